// SPDX-License-Identifier: Apache-2.0
//! The curves of a job in full, in a file of equally long records: a plot of any range of time reads
//! a few hundred points of it, among them the lowest and highest values.

use std::fs::{self, File};
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::history::Sample;

/// Bytes of a record.
const RECORD: usize = 32;
/// Points of a file; six days of a job. When it is full, every second one is dropped, so old points
/// are farther apart than new ones.
const MAX_POINTS: u64 = 1 << 20;
/// Points that are added before a file is thinned again that could not be.
const RETRY_THINNING: u64 = 1 << 12;
/// Points that a plot gets are those of so many equal parts of its range.
const PARTS: u64 = 200;

/// The job at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) at_secs: f64,
    pub(crate) step: u64,
    /// Loss, learning rate, records per second, workers.
    pub(crate) values: [f32; 4],
}

impl From<&Sample> for Point {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "a plot needs no more than 24 bits"
    )]
    fn from(sample: &Sample) -> Self {
        let Sample { at_secs, step, loss, learning_rate, records_per_second, workers, .. } =
            *sample;
        let values = [loss, learning_rate as f32, records_per_second as f32, workers as f32];
        Self { at_secs, step, values }
    }
}

impl Point {
    fn to_bytes(self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        let parts = [self.at_secs.to_le_bytes(), self.step.to_le_bytes()].concat();
        let values = self.values.iter().flat_map(|value| value.to_le_bytes());
        for (place, byte) in bytes.iter_mut().zip(parts.into_iter().chain(values)) {
            *place = byte;
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; RECORD]) -> Self {
        let (at, rest) = bytes.split_first_chunk().expect("a record has 32 bytes");
        let (step, rest) = rest.split_first_chunk().expect("a record has 32 bytes");
        let mut values = [0.0; 4];
        for (value, bytes) in values.iter_mut().zip(rest.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        Self { at_secs: f64::from_le_bytes(*at), step: u64::from_le_bytes(*step), values }
    }
}

/// Adds points to the file.
pub(crate) struct CurveFile {
    path: PathBuf,
    file: File,
    n_points: u64,
    limit: u64,
}

impl CurveFile {
    /// Opens the file of a job. If there is none, or an empty one, it begins with `before`.
    pub(crate) fn open(path: &Path, before: impl Iterator<Item = Point>) -> io::Result<Self> {
        let mut file = File::options().create(true).append(true).read(true).open(path)?;
        // A master that was killed may have left a part of a record.
        let n_points = file.metadata()?.len() / RECORD as u64;
        file.set_len(n_points * RECORD as u64)?;
        let is_new = n_points == 0;
        let bytes: Vec<u8> = before.filter(|_| is_new).flat_map(Point::to_bytes).collect();
        if let Err(error) = file.write_all(&bytes) {
            // The next master writes them again.
            file.set_len(n_points * RECORD as u64)?;
            return Err(error);
        }
        let n_points = n_points + (bytes.len() / RECORD) as u64;
        Ok(Self { path: path.into(), file, n_points, limit: MAX_POINTS })
    }

    pub(crate) fn add(&mut self, point: Point) -> io::Result<()> {
        if self.n_points >= self.limit && self.thin().is_err() {
            // The disk is full: not again at once.
            self.limit = self.n_points + RETRY_THINNING;
        }
        let written = self.file.write_all(&point.to_bytes());
        match written {
            Ok(()) => self.n_points += 1,
            // On a full disk: a part of a record would shift all that follow.
            Err(_) => self.file.set_len(self.n_points * RECORD as u64)?,
        }
        written
    }

    /// Drops every second point.
    fn thin(&mut self) -> io::Result<()> {
        let bytes = fs::read(&self.path)?;
        let kept: Vec<u8> =
            bytes.as_chunks::<RECORD>().0.iter().step_by(2).flatten().copied().collect();
        crate::journal::replace(&self.path, &kept)?;
        self.file = File::options().append(true).read(true).open(&self.path)?;
        self.n_points = (kept.len() / RECORD) as u64;
        self.limit = MAX_POINTS.min(self.limit);
        Ok(())
    }
}

/// The points of a range of time; of many, those with the lowest and highest values of each curve
/// and the last one of every part. A file that does not exist has none.
pub(crate) fn read(path: &Path, range: Range<f64>) -> io::Result<Vec<Point>> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened?,
    };
    let n_points = file.metadata()?.len() / RECORD as u64;
    let from = first(&mut file, n_points, |point| point.at_secs >= range.start)?;
    // A range that ends before it starts is empty.
    let to = first(&mut file, n_points, |point| point.at_secs > range.end)?.max(from);
    file.seek(SeekFrom::Start(from * RECORD as u64))?;
    let mut reader = BufReader::with_capacity(256 << 10, file);
    let mut points = Vec::new();
    for part in 0..PARTS {
        let border = |part: u64| from + (to - from) * part / PARTS;
        let n = usize::try_from(border(part + 1) - border(part)).expect("a part fits in memory");
        let mut bytes = vec![0; n * RECORD];
        reader.read_exact(&mut bytes)?;
        let all = bytes.as_chunks().0.iter().map(Point::from_bytes);
        points.extend(extremes(&all.collect::<Vec<_>>()));
    }
    Ok(points)
}

/// The first point, of points in the order of time, that is not before what is looked for.
fn first(file: &mut File, n_points: u64, is_after: impl Fn(&Point) -> bool) -> io::Result<u64> {
    let (mut low, mut high) = (0, n_points);
    while low < high {
        let middle = low.midpoint(high);
        let mut bytes = [0; RECORD];
        file.seek(SeekFrom::Start(middle * RECORD as u64))?;
        file.read_exact(&mut bytes)?;
        match is_after(&Point::from_bytes(&bytes)) {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    Ok(low)
}

/// What a plot must show of points that share a few pixels.
fn extremes(points: &[Point]) -> impl Iterator<Item = Point> {
    let mut kept: Vec<usize> = points.len().checked_sub(1).into_iter().collect();
    for curve in 0..4 {
        let known = points.iter().enumerate();
        let known = known.filter_map(|(place, point)| Some((place, *point.values.get(curve)?)));
        let known = || known.clone().filter(|(_, value)| value.is_finite());
        kept.extend(known().min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(place, _)| place));
        // The last of equal ones, so that a constant curve adds no points.
        kept.extend(known().max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(place, _)| place));
    }
    kept.sort_unstable();
    kept.dedup();
    kept.into_iter().filter_map(|place| points.get(place).copied())
}

/// The points as the page reads them: rows of time, step and the values.
pub(crate) fn to_json(points: &[Point]) -> Value {
    let row = |Point { at_secs, step, values: [loss, rate, speed, workers] }: &Point| {
        json!([at_secs, step, loss, rate, speed, workers])
    };
    points.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(n: u64) -> Point {
        Point { at_secs: 1000.0 + n as f64 / 2.0, step: n, values: [1.0, 0.1, 500.0, 2.0] }
    }

    fn written(points: impl Iterator<Item = Point>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("curves.bin");
        drop(CurveFile::open(&path, points).unwrap());
        (folder, path)
    }

    #[test]
    fn a_short_range_is_read_in_full_and_a_long_one_with_its_lowest_and_highest_values() {
        let mut points: Vec<Point> = (0..1_000_000).map(point).collect();
        points[123_456].values[0] = 9.0;
        points[654_321].values[2] = 1.0;
        points[700_000].values[0] = f32::NAN;
        let (_folder, path) = written(points.iter().copied());
        let all = read(&path, 0.0..f64::INFINITY).unwrap();
        assert!(all.len() < 1000, "{}", all.len());
        assert!(all.is_sorted_by_key(|point| point.at_secs));
        assert!(all.contains(&points[123_456]) && all.contains(&points[654_321]));
        assert_eq!(all.last(), points.last());
        let some = read(&path, 51_000.0..51_050.0).unwrap();
        assert_eq!(some, points[100_000..=100_100]);
        for (from, to) in
            [(0.0, 10.0), (51_050.0, 51_000.0), (f64::MAX, f64::MIN), (f64::NAN, 2000.0)]
        {
            assert!(read(&path, from..to).unwrap().is_empty(), "{from} to {to}");
        }
        assert!(read(&path.with_extension("none"), 0.0..10.0).unwrap().is_empty());
    }

    #[test]
    fn the_file_of_a_killed_master_is_continued_and_a_full_one_is_thinned() {
        let (_folder, path) = written((0..10).map(point));
        let whole = fs::read(&path).unwrap();
        fs::write(&path, [&whole, &b"part"[..]].concat()).unwrap();
        let mut file = CurveFile::open(&path, (0..99).map(point)).unwrap();
        file.limit = 16;
        for n in 10..40 {
            file.add(point(n)).unwrap();
        }
        let steps: Vec<u64> =
            read(&path, 0.0..f64::MAX).unwrap().iter().map(|point| point.step).collect();
        assert!(steps.len() <= 16 && steps.is_sorted(), "{steps:?}");
        assert_eq!((steps.first(), steps.last()), (Some(&0), Some(&39)));
    }

    #[test]
    fn a_loss_that_is_not_known_is_no_number_for_the_page() {
        let unknown = Point { values: [f32::NAN, 0.5, 1.0, 2.0], ..point(3) };
        assert_eq!(to_json(&[unknown]).to_string(), "[[1001.5,3,null,0.5,1.0,2.0]]");
    }
}
