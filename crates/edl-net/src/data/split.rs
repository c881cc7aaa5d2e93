// SPDX-License-Identifier: Apache-2.0
//! Sorts the ids of a batch by partition and table, and remembers where each came from.
//!
//! One counting sort serves all servers: what one server holds is one range of partitions and
//! therefore one range of the result. All buffers are kept from batch to batch.

use std::ops::Range;

use edl_core::layout::Layout;
use edl_core::rng;

/// The ids of one batch, sorted.
#[derive(Debug, Default)]
pub(crate) struct Split {
    n_tables: usize,
    /// Per partition, per table: how many ids.
    counts: Vec<u32>,
    /// Per partition and table: where its ids begin; one more for the end.
    starts: Vec<usize>,
    /// The ids in the order of `counts`.
    ids: Vec<u64>,
    /// For each sorted id its place in the caller's list of its table.
    origins: Vec<u32>,
    /// The partition and table of each id, in the caller's order: hashing twice would cost more.
    groups: Vec<u32>,
    /// Per partition and table: where its next id goes.
    next: Vec<usize>,
}

impl Split {
    /// Sorts `ids`, one list per table.
    ///
    /// # Panics
    /// If there are 2^32 ids or more.
    pub(crate) fn sort(&mut self, layout: &Layout, ids: &[Vec<u64>]) {
        let n_tables = ids.len();
        let n_groups = layout.n_partitions as usize * n_tables;
        assert!(u32::try_from(n_groups).is_ok(), "partitions times tables are counted in 32 bits");
        self.n_tables = n_tables;
        self.counts.clear();
        self.counts.resize(n_groups, 0);
        self.groups.clear();
        let rows = layout.with_rows();
        for (table, ids) in ids.iter().enumerate() {
            let first = self.groups.len();
            // Separate passes, because each is then a short loop that the core can run ahead in.
            self.groups.extend(ids.iter().map(|id| group(&rows, *id, n_tables, table)));
            for group in &self.groups[first..] {
                self.counts[*group as usize] += 1;
            }
        }
        let n_ids = self.groups.len();
        assert!(u32::try_from(n_ids).is_ok(), "a batch has fewer than 2^32 ids");
        self.starts.clear();
        let mut start = 0;
        self.starts.extend(self.counts.iter().map(|count| {
            let this = start;
            start += *count as usize;
            this
        }));
        self.starts.push(n_ids);
        self.ids.resize(n_ids, 0);
        self.origins.resize(n_ids, 0);
        self.place(ids);
    }

    fn place(&mut self, ids: &[Vec<u64>]) {
        let Self { starts, next, groups, ids: sorted, origins, .. } = self;
        next.clone_from(starts);
        let mut groups = groups.as_slice();
        for ids in ids {
            let (here, rest) = groups.split_at(ids.len());
            groups = rest;
            for ((origin, id), group) in (0..).zip(ids).zip(here) {
                let next = &mut next[*group as usize];
                sorted[*next] = *id;
                origins[*next] = origin;
                *next += 1;
            }
        }
    }

    /// How many ids each partition of the range has in each table.
    pub(crate) fn counts(&self, partitions: &Range<u32>) -> &[u32] {
        let place = |partition: u32| partition as usize * self.n_tables;
        &self.counts[place(partitions.start)..place(partitions.end)]
    }

    /// The ids of a range of partitions.
    pub(crate) fn ids(&self, partitions: &Range<u32>) -> &[u64] {
        &self.ids[self.span(partitions)]
    }

    /// Where the ids of a range of partitions lie among all.
    fn span(&self, partitions: &Range<u32>) -> Range<usize> {
        let place = |partition: u32| self.starts[partition as usize * self.n_tables];
        if self.n_tables == 0 { 0..0 } else { place(partitions.start)..place(partitions.end) }
    }

    /// Numbers that the rows of a range of partitions have.
    pub(crate) fn n_row_floats(&self, partitions: &Range<u32>, dims: &[usize]) -> usize {
        let counts = self.counts(partitions).iter().zip(dims.iter().cycle());
        counts.map(|(count, dim)| *count as usize * dim).sum()
    }

    /// Brings rows in sorted order back into the caller's, for a range of partitions.
    pub(crate) fn scatter(
        &self,
        partitions: &Range<u32>,
        dims: &[usize],
        mut sorted: &[f32],
        rows: &mut [Vec<f32>],
    ) {
        for partition in partitions.clone() {
            for (table, dim) in dims.iter().enumerate() {
                let origins = &self.origins[self.group(partition, table)];
                let (here, rest) = sorted.split_at(origins.len() * dim);
                sorted = rest;
                match dim {
                    // The usual widths, as copies of a length that the compiler knows.
                    8 => scatter_rows::<8>(origins, here, &mut rows[table]),
                    16 => scatter_rows::<16>(origins, here, &mut rows[table]),
                    32 => scatter_rows::<32>(origins, here, &mut rows[table]),
                    dim => {
                        for (origin, row) in origins.iter().zip(here.chunks_exact(*dim)) {
                            let at = *origin as usize * dim;
                            rows[table][at..at + dim].copy_from_slice(row);
                        }
                    }
                }
            }
        }
    }

    /// Brings rows in the caller's order into sorted order, for all partitions: they lie in
    /// `sorted` from its beginning. It is made longer if needed and never shorter, so that only
    /// growth is paid for.
    pub(crate) fn gather(&self, dims: &[usize], rows: &[Vec<f32>], sorted: &mut Vec<f32>) {
        let widths = self.counts.iter().zip(dims.iter().cycle());
        let n_floats = widths.map(|(count, dim)| *count as usize * dim).sum();
        if sorted.len() < n_floats {
            sorted.resize(n_floats, 0.0);
        }
        let mut sorted = sorted.as_mut_slice();
        for (place, bounds) in self.starts.windows(2).enumerate() {
            let table = place % self.n_tables;
            let (rows, dim) = (&rows[table], dims[table]);
            let origins = &self.origins[bounds[0]..bounds[1]];
            let (here, rest) = sorted.split_at_mut(origins.len() * dim);
            sorted = rest;
            match dim {
                8 => gather_rows::<8>(origins, rows, here),
                16 => gather_rows::<16>(origins, rows, here),
                32 => gather_rows::<32>(origins, rows, here),
                dim => {
                    for (origin, row) in origins.iter().zip(here.chunks_exact_mut(dim)) {
                        let at = *origin as usize * dim;
                        row.copy_from_slice(&rows[at..at + dim]);
                    }
                }
            }
        }
    }

    fn group(&self, partition: u32, table: usize) -> Range<usize> {
        let place = partition as usize * self.n_tables + table;
        self.starts[place]..self.starts[place + 1]
    }
}

fn scatter_rows<const DIM: usize>(origins: &[u32], sorted: &[f32], rows: &mut [f32]) {
    let (rows, _) = rows.as_chunks_mut::<DIM>();
    let (sorted, _) = sorted.as_chunks::<DIM>();
    for (origin, row) in origins.iter().zip(sorted) {
        rows[*origin as usize] = *row;
    }
}

fn gather_rows<const DIM: usize>(origins: &[u32], rows: &[f32], sorted: &mut [f32]) {
    let (rows, _) = rows.as_chunks::<DIM>();
    let (sorted, _) = sorted.as_chunks_mut::<DIM>();
    for (origin, row) in origins.iter().zip(sorted) {
        *row = rows[*origin as usize];
    }
}

/// The place of an id's partition and table among all. `Layout::partition_of` is spelled out:
/// called across crates for each id, it took most of the time of a sort.
fn group(rows: &Range<u32>, id: u64, n_tables: usize, table: usize) -> u32 {
    let place = (u128::from(rng::mix(id)) * u128::from(rows.end - rows.start)) >> 64;
    #[expect(clippy::cast_possible_truncation, reason = "checked for the last group of all")]
    let group = ((rows.start as usize + place as usize) * n_tables + table) as u32;
    group
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One number per element that names table, id and column.
    fn row(table: usize, id: u64, dim: usize) -> Vec<f32> {
        (0..dim).map(|column| (table * 10_000 + column) as f32 + id as f32 * 16.0).collect()
    }

    proptest! {
        #[test]
        fn it_equals_a_plain_sort_and_finds_the_way_back(
            tables in proptest::collection::vec(
                (prop_oneof![Just(1), Just(3), Just(8), Just(16)],
                 proptest::collection::vec(0..500_u64, 0..60)), 0..4),
            n_each in 1..9_u32, is_apart in any::<bool>(), cut in 0..18_u32,
        ) {
            let layout =
                if is_apart { Layout::apart(0, n_each) } else { Layout::shared(0, n_each) };
            let n_partitions = layout.n_partitions;
            let dims: Vec<usize> = tables.iter().map(|(dim, _)| *dim).collect();
            let ids: Vec<Vec<u64>> = tables.iter().map(|(_, ids)| ids.clone()).collect();
            let mut naive_ids = Vec::new();
            let mut naive_rows = Vec::new();
            let mut naive_counts = Vec::new();
            for partition in 0..n_partitions {
                for (table, ids) in ids.iter().enumerate() {
                    let mine = ids.iter().filter(|id| layout.partition_of(**id).0 == partition);
                    naive_counts.push(u32::try_from(mine.clone().count()).unwrap());
                    naive_ids.extend(mine.clone().copied());
                    naive_rows.extend(mine.flat_map(|id| row(table, *id, dims[table])));
                }
            }
            let mut split = Split::default();
            // The second time works on used buffers.
            split.sort(&layout, &[vec![1, 2, 3]]);
            split.sort(&layout, &ids);
            let whole = 0..n_partitions;
            prop_assert_eq!(split.counts(&whole), &naive_counts[..]);
            prop_assert_eq!(split.ids(&whole), &naive_ids[..]);
            let rows: Vec<Vec<f32>> = (ids.iter().enumerate())
                .map(|(table, ids)| ids.iter().flat_map(|id| row(table, *id, dims[table])).collect())
                .collect();
            let mut sorted = vec![7.0];
            split.gather(&dims, &rows, &mut sorted);
            prop_assert_eq!(&sorted[..naive_rows.len()], &naive_rows[..]);
            let mut back: Vec<Vec<f32>> = rows.iter().map(|rows| vec![0.0; rows.len()]).collect();
            let cut = cut.min(n_partitions);
            let n_low = split.n_row_floats(&(0..cut), &dims);
            split.scatter(&(0..cut), &dims, &sorted[..n_low], &mut back);
            let high = &sorted[n_low..naive_rows.len()];
            split.scatter(&(cut..n_partitions), &dims, high, &mut back);
            prop_assert_eq!(back, rows);
        }
    }
}
