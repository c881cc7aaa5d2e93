// SPDX-License-Identifier: Apache-2.0
//! Embedding rows by id: one partition's share of one table.
//!
//! A row is its weights followed by its optimizer slots, so an update touches one place.
//! Rows lie in chunks of fixed size that never move; an index maps ids to row numbers. Calls
//! work in small groups of ids: they ask for all index lines, then for all rows, and then touch
//! the rows, so that many cache misses overlap.

mod index;

use edl_core::model::{Init, TableSpec};

use crate::init::{self, InitialValues};
use crate::optimizer::{MAX_SLOTS, Optimizer, Slots, Update};

use index::Index;
pub(crate) use index::hash;

/// Rows of equal length in chunks that never move, in the order in which they were made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slab {
    stride: usize,
    /// Rows per chunk, as a power of two.
    shift: u32,
    ids: Vec<u64>,
    chunks: Vec<Vec<Line>>,
}

/// Chunks are made of cache lines, so a row of sixteen numbers never lies in two.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
struct Line([f32; LINE]);

/// Numbers in a line.
const LINE: usize = 16;

/// The rows of one table that one partition holds.
#[derive(Clone, Debug)]
pub struct Table {
    dim: usize,
    init: Init,
    key: u64,
    /// Initial values of the slots of one row.
    fresh_slots: Vec<f32>,
    slab: Slab,
    index: Index,
}

/// How many ids are resolved before their rows are touched: enough misses to be under way at
/// once, few enough for what was loaded to be still there.
const GROUP: usize = 32;

impl Slab {
    /// Numbers in a chunk, unless a single row is longer: 1 MiB. What of it is not used yet is
    /// not backed by memory either.
    const CHUNK: usize = 1 << 18;

    #[must_use]
    pub fn new(stride: usize) -> Self {
        let rows = (Self::CHUNK / stride.max(1)).max(1);
        Self { stride, shift: rows.ilog2(), ids: Vec::new(), chunks: Vec::new() }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Numbers per row.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    #[must_use]
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// The rows in the order of `ids`, in pieces of many rows.
    pub fn chunks(&self) -> impl Iterator<Item = &[f32]> {
        let rows = self.ids.chunks(1 << self.shift).map(<[u64]>::len);
        self.chunks.iter().zip(rows).map(|(chunk, rows)| &numbers(chunk)[..rows * self.stride])
    }

    /// Each id with its row.
    pub fn rows(&self) -> impl Iterator<Item = (u64, &[f32])> {
        (0..).zip(&self.ids).map(|(place, id)| (*id, self.row(place)))
    }

    /// Copies another slab, reusing this one's memory where it can.
    pub fn copy_from(&mut self, other: &Self) {
        self.stride = other.stride;
        self.shift = other.shift;
        self.ids.clone_from(&other.ids);
        self.chunks.truncate(other.chunks.len());
        let reused = self.chunks.len();
        for (chunk, source) in self.chunks.iter_mut().zip(&other.chunks) {
            chunk.clone_from(source);
        }
        self.chunks.extend(other.chunks[reused..].iter().cloned());
    }

    /// Makes a slab of `ids` whose rows `read` fills, chunk by chunk.
    pub(crate) fn read<E>(
        stride: usize,
        ids: Vec<u64>,
        mut read: impl FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut slab = Self::new(stride);
        let mut left = ids.len();
        while left > 0 {
            let rows = left.min(1 << slab.shift);
            let mut chunk = slab.new_chunk();
            chunk.resize((rows * stride).div_ceil(LINE), Line::default());
            read(&mut numbers_mut(&mut chunk)[..rows * stride])?;
            slab.chunks.push(chunk);
            left -= rows;
        }
        slab.ids = ids;
        Ok(slab)
    }

    fn lines_per_chunk(&self) -> usize {
        (self.stride << self.shift).div_ceil(LINE)
    }

    fn new_chunk(&self) -> Vec<Line> {
        Vec::with_capacity(self.lines_per_chunk())
    }

    /// Makes room to grow in the last chunk of a copy: chunks must not move once in use.
    fn reserve_last(&mut self) {
        let lines = self.lines_per_chunk();
        if let Some(last) = self.chunks.last_mut() {
            last.reserve_exact(lines - last.len());
        }
    }

    #[inline]
    fn locate(&self, place: u32) -> (usize, usize) {
        let place = place as usize;
        let mask = (1 << self.shift) - 1;
        (place >> self.shift, (place & mask) * self.stride)
    }

    #[inline]
    fn row(&self, place: u32) -> &[f32] {
        let (chunk, start) = self.locate(place);
        &numbers(&self.chunks[chunk])[start..start + self.stride]
    }

    #[inline]
    fn row_mut(&mut self, place: u32) -> &mut [f32] {
        let (chunk, start) = self.locate(place);
        &mut numbers_mut(&mut self.chunks[chunk])[start..start + self.stride]
    }

    /// Copies the first `N` numbers of rows. That the length is known saves a call per row.
    fn copy_rows<const N: usize>(&self, places: &[u32], out: &mut [f32]) {
        for (place, out) in places.iter().zip(out.as_chunks_mut::<N>().0) {
            if let Some(numbers) = self.row(*place).first_chunk() {
                *out = *numbers;
            }
        }
    }

    /// Adds a row of zeros and returns its place.
    fn push(&mut self, id: u64) -> u32 {
        let place = u32::try_from(self.ids.len()).expect("the index has refused more rows before");
        let (chunk, start) = self.locate(place);
        if chunk == self.chunks.len() {
            self.chunks.push(self.new_chunk());
        }
        self.chunks[chunk].resize((start + self.stride).div_ceil(LINE), Line::default());
        self.ids.push(id);
        place
    }
}

fn numbers(lines: &[Line]) -> &[f32] {
    bytemuck::cast_slice(lines)
}

fn numbers_mut(lines: &mut [Line]) -> &mut [f32] {
    bytemuck::cast_slice_mut(lines)
}

impl Table {
    #[must_use]
    pub fn new(spec: &TableSpec, seed: u64, optimizer: &Optimizer) -> Self {
        let n_slots = optimizer.n_slots();
        let fresh = |slot| std::iter::repeat_n(optimizer.initial(slot), spec.dim);
        Self {
            dim: spec.dim,
            init: spec.init,
            key: init::name_key(seed, &spec.name),
            fresh_slots: (0..n_slots).flat_map(fresh).collect(),
            slab: Slab::new(spec.dim * (1 + n_slots)),
            index: Index::default(),
        }
    }

    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.slab.len()
    }

    #[must_use]
    pub fn slab(&self) -> &Slab {
        &self.slab
    }

    /// Takes rows, with their slots if `keep_slots`. Names an id that comes twice.
    pub(crate) fn load(&mut self, mut slab: Slab, keep_slots: bool) -> Result<(), u64> {
        if !keep_slots {
            slab = self.with_fresh_slots(&slab);
        }
        assert_eq!(slab.stride, self.slab.stride, "the caller compared dimensions and slots");
        slab.reserve_last();
        let mut index = Index::with_capacity(slab.len());
        for (place, id) in (0..).zip(&slab.ids) {
            if index.get(*id).is_some() {
                return Err(*id);
            }
            index.insert(*id, place);
        }
        self.index = index;
        self.slab = slab;
        Ok(())
    }

    /// Makes those of the rows, of the ids from zero on, that belong here.
    pub fn give(&mut self, rows: &[f32], is_here: impl Fn(u64) -> bool) {
        for (id, row) in (0..).zip(rows.chunks_exact(self.dim.max(1))) {
            if is_here(id) {
                let place = self.make(id);
                self.slab.row_mut(place)[..self.dim].copy_from_slice(row);
            }
        }
    }

    fn with_fresh_slots(&self, other: &Slab) -> Slab {
        let mut slab = Slab::new(self.slab.stride);
        for (id, row) in other.rows() {
            let place = slab.push(id);
            let (weights, slots) = slab.row_mut(place).split_at_mut(self.dim);
            weights.copy_from_slice(&row[..self.dim]);
            slots.copy_from_slice(&self.fresh_slots);
        }
        slab
    }

    /// Writes the weights of `ids` to `out`; missing rows are made.
    ///
    /// # Panics
    /// If `out` does not hold one row per id.
    pub fn gather(&mut self, ids: &[u64], out: &mut [f32]) {
        let dim = self.dim;
        assert_eq!(out.len(), ids.len() * dim, "one row per id");
        if dim == 0 {
            return;
        }
        for (ids, out) in ids.chunks(GROUP).zip(out.chunks_mut(GROUP * dim)) {
            let places = self.resolve(ids, dim);
            match dim {
                8 => self.slab.copy_rows::<8>(&places, out),
                16 => self.slab.copy_rows::<16>(&places, out),
                32 => self.slab.copy_rows::<32>(&places, out),
                64 => self.slab.copy_rows::<64>(&places, out),
                dim => {
                    for (place, out) in places.iter().zip(out.chunks_exact_mut(dim)) {
                        out.copy_from_slice(&self.slab.row(*place)[..dim]);
                    }
                }
            }
        }
    }

    /// Like `gather`, but missing rows are not kept.
    ///
    /// # Panics
    /// If `out` does not hold one row per id.
    pub fn peek(&self, ids: &[u64], out: &mut [f32]) {
        assert_eq!(out.len(), ids.len() * self.dim, "one row per id");
        if self.dim == 0 {
            return;
        }
        for (id, out) in ids.iter().zip(out.chunks_exact_mut(self.dim)) {
            match self.index.get(*id) {
                Some(place) => out.copy_from_slice(&self.slab.row(place)[..self.dim]),
                None => InitialValues::row(self.init, self.key, *id).fill(0, out),
            }
        }
    }

    /// Applies one row of gradient per id; missing rows are made first. Weight decay reaches the
    /// rows that a batch names, when it names them.
    ///
    /// # Panics
    /// If `grads` does not hold one row per id.
    pub fn update(&mut self, update: &Update, ids: &[u64], grads: &[f32]) {
        let dim = self.dim;
        assert_eq!(grads.len(), ids.len() * dim, "one row per id");
        if dim == 0 {
            return;
        }
        for (ids, grads) in ids.chunks(GROUP).zip(grads.chunks(GROUP * dim)) {
            let places = self.resolve(ids, self.slab.stride);
            for (place, grad) in places.iter().zip(grads.chunks_exact(dim)) {
                let (weights, slots) = self.slab.row_mut(*place).split_at_mut(dim);
                update.apply(weights, split(slots, dim), grad, true);
            }
        }
    }

    /// Finds or makes the row of each id of a group, and asks for the first `ahead` numbers of it.
    #[inline]
    fn resolve(&mut self, ids: &[u64], ahead: usize) -> [u32; GROUP] {
        let mut homes = [0; GROUP];
        for (home, id) in homes.iter_mut().zip(ids) {
            *home = self.index.home(*id);
            self.index.prefetch(*home);
        }
        let mut places = [0; GROUP];
        for ((place, home), id) in places.iter_mut().zip(homes).zip(ids) {
            *place = match self.index.get_from(home, *id) {
                Some(place) => place,
                None => self.make(*id),
            };
            prefetch(&self.slab.row(*place)[..ahead]);
        }
        places
    }

    /// Makes a row, unless the index has grown since its home was computed and it is there.
    #[cold]
    fn make(&mut self, id: u64) -> u32 {
        if let Some(place) = self.index.get(id) {
            return place;
        }
        let place = self.slab.push(id);
        let (weights, slots) = self.slab.row_mut(place).split_at_mut(self.dim);
        InitialValues::row(self.init, self.key, id).fill(0, weights);
        slots.copy_from_slice(&self.fresh_slots);
        self.index.insert(id, place);
        place
    }

    /// Panics if the index and the rows disagree.
    pub fn check_invariants(&self) {
        assert_eq!(self.index.len(), self.slab.len(), "each row has one index entry");
        for (place, id) in (0..).zip(&self.slab.ids) {
            assert_eq!(self.index.get(*id), Some(place), "row {id} is where it was put");
        }
    }
}

/// Splits the slots of one row.
fn split(slots: &mut [f32], dim: usize) -> Slots<'_> {
    let n_slots = slots.len() / dim;
    let mut rest = slots;
    let mut split: Slots<'_> = [&mut [], &mut [], &mut []];
    for slot in split.iter_mut().take(n_slots.min(MAX_SLOTS)) {
        let (head, tail) = rest.split_at_mut(dim);
        *slot = head;
        rest = tail;
    }
    split
}

/// Asks the processor to load a value, line by line, before it is needed.
#[inline]
fn prefetch<T: ?Sized>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = std::ptr::from_ref(value).cast::<i8>();
        for offset in (0..size_of_val(value)).step_by(size_of::<Line>()) {
            #[expect(unsafe_code, reason = "the instruction has no safe form")]
            // SAFETY: a prefetch reads and writes nothing, regardless of the address.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(offset));
            }
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = value;
}

#[cfg(test)]
mod tests {
    use edl_core::optimizer::{OptimizerKind, OptimizerSpec};

    use super::*;
    use crate::optimizer::Step;

    fn optimizer(kind: OptimizerKind) -> Optimizer {
        Optimizer::new(OptimizerSpec { kind, weight_decay: 0.5, ..OptimizerSpec::sgd(0.1) })
    }

    fn kinds() -> Vec<OptimizerKind> {
        let (beta_1, beta_2, epsilon) = (0.9, 0.99, 1e-7);
        vec![
            OptimizerKind::Sgd,
            OptimizerKind::Momentum { momentum: 0.9, nesterov: true, dampening: 0.0 },
            OptimizerKind::AdamW { beta_1, beta_2, epsilon },
            OptimizerKind::Adam { beta_1, beta_2, epsilon, amsgrad: true },
            OptimizerKind::Adagrad { initial_accumulator: 0.1, epsilon },
            OptimizerKind::RmsProp { rho: 0.9, epsilon, momentum: 0.5, centered: true },
            OptimizerKind::Ftrl {
                learning_rate_power: -0.5,
                l1: 0.01,
                l2: 0.01,
                initial_accumulator: 0.1,
                l2_shrinkage: 0.01,
                beta: 0.1,
            },
            OptimizerKind::Adadelta { rho: 0.9, epsilon },
            OptimizerKind::Adamax { beta_1, beta_2, epsilon },
            OptimizerKind::Nadam { beta_1, beta_2, epsilon, momentum_decay: 1.0 },
            OptimizerKind::Lion { beta_1, beta_2 },
        ]
    }

    #[test]
    fn a_row_changes_as_the_same_numbers_do_elsewhere() {
        for dim in [1, 3, 16] {
            for kind in kinds() {
                let optimizer = optimizer(kind);
                let init = Init::Normal { mean: 0.0, std: 1.0 };
                let spec = TableSpec { name: "t".into(), dim, init };
                let mut table = Table::new(&spec, 1, &optimizer);
                let mut weights = vec![0.0; dim];
                table.gather(&[7], &mut weights);
                let mut slots = [0, 1, 2].map(|slot| vec![optimizer.initial(slot); dim]);
                for version in 0..4 {
                    let update = optimizer.update(Step { version, age: version + 1, staleness: 1 });
                    let grad: Vec<f32> = (0..dim).map(|i| i as f32 - version as f32).collect();
                    let [a, b, c] = &mut slots;
                    update.apply(&mut weights, [a, b, c], &grad, true);
                    // A neighbour with another gradient must not be mixed up with it.
                    table.update(&update, &[8, 7], &[vec![1.0; dim], grad].concat());
                    let mut row = vec![0.0; dim];
                    table.gather(&[7], &mut row);
                    assert_eq!(row, weights, "{:?}", optimizer.spec().kind);
                }
            }
        }
    }

    #[test]
    fn an_id_that_comes_twice_while_the_index_grows_has_one_row() {
        let optimizer = optimizer(OptimizerKind::Sgd);
        let init = Init::Uniform { low: 0.0, high: 1.0 };
        let mut table = Table::new(&TableSpec { name: "t".into(), dim: 2, init }, 1, &optimizer);
        let ids: Vec<u64> = (0..5000).flat_map(|i| [i, i / 2, i]).collect();
        table.gather(&ids, &mut vec![0.0; ids.len() * 2]);
        assert_eq!(table.n_rows(), 5000);
        table.check_invariants();
    }
}
