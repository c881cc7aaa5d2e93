// SPDX-License-Identifier: Apache-2.0
//! The measurements of one application: step time by placement and local batch, progress and
//! gradient noise by epoch and batch.

use std::collections::BTreeMap;

use super::table;
use super::{Error, Files};

/// The application that does not scale.
pub(super) const SINGLE: &str = "ncf";

/// Constants of the artifact.
pub(super) struct Limits {
    pub(super) name: &'static str,
    n_epochs: usize,
    max_local: Option<u32>,
}

const fn limits(name: &'static str, n_epochs: usize, max_local: Option<u32>) -> Limits {
    Limits { name, n_epochs, max_local }
}

pub(super) const LIMITS: [Limits; 6] = [
    limits("bert", 2, None),
    limits("cifar10", 100, None),
    limits(SINGLE, 10, None),
    limits("imagenet", 90, None),
    limits("deepspeech2", 80, None),
    limits("yolov3", 50, Some(8)),
];

/// The most nodes that were measured.
const MOST_NODES: u32 = 16;

#[derive(Clone, Debug)]
pub struct Application {
    pub name: String,
    pub init_batch: u32,
    pub max_batch: u32,
    pub min_local: u32,
    pub max_local: u32,
    pub n_epochs: usize,
    /// By batch size, then by epoch.
    validation: BTreeMap<u32, Vec<Epoch>>,
    /// Curves of measured placements, by workers on each node.
    placements: BTreeMap<Vec<u32>, Curve>,
    /// Curves by number of nodes and workers.
    grid: Vec<GridPoint>,
    /// Triangles of grid points between which times are interpolated.
    triangles: Vec<[usize; 3]>,
}

#[derive(Clone, Copy, Debug)]
struct Epoch {
    progress: f64,
    iteration: f64,
    grad_sqr: f64,
    grad_var: f64,
}

/// Times by local batch, in order.
type Curve = Vec<(f64, StepTime)>;

/// Seconds of a step, and its share of synchronization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    pub step: f64,
    pub sync: f64,
}

#[derive(Clone, Debug)]
struct GridPoint {
    n_nodes: f64,
    n_replicas: f64,
    curve: Curve,
}

impl Application {
    pub(super) fn parse(files: &Files, limits: &Limits) -> Result<Self, Error> {
        let folder = format!("traces/{}/", limits.name);
        let validation = parse_validation(files, &folder)?;
        let placements = parse_placements(files, &format!("{folder}placements.csv"))?;
        let mut grid = mean_by_size(&placements);
        parse_scalability(files, &format!("{folder}scalability.csv"), &mut grid)?;
        let missing = || Error::Missing(folder.clone());
        let local = placements.values().flatten().map(|(bsz, _)| *bsz);
        let least = local.clone().fold(f64::INFINITY, f64::min);
        let most = local.fold(0.0, f64::max);
        let triangles = triangulate(&grid);
        Ok(Self {
            name: limits.name.to_owned(),
            init_batch: *validation.keys().next().ok_or_else(missing)?,
            max_batch: *validation.keys().next_back().ok_or_else(missing)?,
            min_local: whole(least),
            max_local: limits.max_local.unwrap_or(whole(most)),
            n_epochs: limits.n_epochs,
            validation,
            placements,
            grid,
            triangles,
        })
    }

    /// Progress at which `epoch` epochs are over.
    #[must_use]
    pub fn progress_at(&self, epoch: usize) -> f64 {
        let Some(last) = epoch.checked_sub(1) else { return 0.0 };
        let each =
            self.validation.values().map(|epochs| epochs[last.min(epochs.len() - 1)].progress);
        each.fold(f64::INFINITY, f64::min)
    }

    /// Steps after which `epoch` (counted from 0) is over with a batch.
    #[must_use]
    pub fn iteration_at(&self, batch: f64, epoch: usize) -> f64 {
        self.between(batch, epoch, |epoch| epoch.iteration)
    }

    /// Squared norm and variance of gradients during an epoch (counted from 0).
    #[must_use]
    pub fn noise(&self, batch: f64, epoch: usize) -> (f64, f64) {
        let sqr = self.between(batch, epoch, |epoch| epoch.grad_sqr);
        (sqr, self.between(batch, epoch, |epoch| epoch.grad_var))
    }

    /// Time of a step with this many workers on each node and a local batch of this size.
    #[must_use]
    pub fn step_time(&self, workers: &[u32], local: f64) -> StepTime {
        let smallest = smallest_rotation(workers);
        if let Some(curve) = self.placements.get(&smallest) {
            return on_curve(curve, local);
        }
        let n_nodes = u32::try_from(workers.len()).unwrap_or(MOST_NODES).min(MOST_NODES);
        let n_replicas: u32 = workers.iter().sum();
        self.on_grid(f64::from(n_nodes), f64::from(n_replicas), local)
    }

    fn on_grid(&self, n_nodes: f64, n_replicas: f64, local: f64) -> StepTime {
        for triangle in &self.triangles {
            let Some(weights) = weights_in(&self.grid, *triangle, n_nodes, n_replicas) else {
                continue;
            };
            let mut sum = StepTime { step: 0.0, sync: 0.0 };
            for (corner, weight) in triangle.iter().zip(weights) {
                let time = on_curve(&self.grid[*corner].curve, local);
                sum.step += weight * time.step;
                sum.sync += weight * time.sync;
            }
            return sum;
        }
        // Outside of all measurements: as at the nearest point.
        let distance = |point: &&GridPoint| {
            (point.n_nodes - n_nodes).powi(2) + (point.n_replicas - n_replicas).powi(2)
        };
        let nearest = self.grid.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
        nearest.map_or(StepTime { step: 1.0, sync: 0.0 }, |point| on_curve(&point.curve, local))
    }

    /// A value between those of the validated batches around `batch`.
    fn between(&self, batch: f64, epoch: usize, value: impl Fn(&Epoch) -> f64) -> f64 {
        let at = |epochs: &Vec<Epoch>| value(&epochs[epoch.min(epochs.len() - 1)]);
        let mut below: Option<(f64, f64)> = None;
        for (size, epochs) in &self.validation {
            let size = f64::from(*size);
            let here = (size, at(epochs));
            if size >= batch {
                let Some((low, low_value)) = below else { return here.1 };
                let share = (batch - low) / (size - low);
                return share * here.1 + (1.0 - share) * low_value;
            }
            below = Some(here);
        }
        below.map_or(0.0, |(_, value)| value)
    }
}

fn parse_validation(files: &Files, folder: &str) -> Result<BTreeMap<u32, Vec<Epoch>>, Error> {
    let mut validation = BTreeMap::new();
    let prefix = format!("{folder}validation-");
    for path in files.keys().filter(|path| path.starts_with(&prefix)) {
        let batch = path[prefix.len()..].strip_suffix(".csv").and_then(|text| text.parse().ok());
        let batch: u32 = batch.ok_or_else(|| Error::Missing(path.clone()))?;
        let columns = ["progress", "iteration", "grad_sqr", "grad_var"];
        let epoch = |row: &table::Record<'_>| {
            Ok(Epoch {
                progress: row.number(0)?,
                iteration: row.number(1)?,
                grad_sqr: row.number(2)?,
                grad_var: row.number(3)?,
            })
        };
        let rows = table::rows(files, path, &columns)?;
        validation.insert(batch, rows.iter().map(epoch).collect::<Result<_, Error>>()?);
    }
    Ok(validation)
}

fn parse_placements(files: &Files, path: &str) -> Result<BTreeMap<Vec<u32>, Curve>, Error> {
    let mut placements: BTreeMap<Vec<u32>, Curve> = BTreeMap::new();
    for row in table::rows(files, path, &["placement", "local_bsz", "step_time", "sync_time"])? {
        let digits = row.text(0).chars().filter_map(|digit| digit.to_digit(10)).collect();
        let time = StepTime { step: row.number(2)?, sync: row.number(3)? };
        placements.entry(digits).or_default().push((row.number(1)?, time));
    }
    for curve in placements.values_mut() {
        curve.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    Ok(placements)
}

fn parse_scalability(files: &Files, path: &str, grid: &mut Vec<GridPoint>) -> Result<(), Error> {
    let columns = ["num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"];
    let mut by_size: BTreeMap<(u32, u32), Curve> = BTreeMap::new();
    for row in table::rows(files, path, &columns)? {
        let size = (row.integer(0)?, row.integer(1)?);
        let time = StepTime { step: row.number(3)?, sync: row.number(4)? };
        by_size.entry(size).or_default().push((row.number(2)?, time));
    }
    for ((n_nodes, n_replicas), mut curve) in by_size {
        curve.sort_by(|a, b| a.0.total_cmp(&b.0));
        grid.push(GridPoint { n_nodes: n_nodes.into(), n_replicas: n_replicas.into(), curve });
    }
    Ok(())
}

/// The mean of all placements with as many nodes and workers, for each local batch.
fn mean_by_size(placements: &BTreeMap<Vec<u32>, Curve>) -> Vec<GridPoint> {
    let mut sums: BTreeMap<(usize, u32), BTreeMap<u64, (f64, StepTime)>> = BTreeMap::new();
    for (placement, curve) in placements {
        let size = (placement.len(), placement.iter().sum());
        let by_local = sums.entry(size).or_default();
        for (local, time) in curve {
            let zero = (0.0, StepTime { step: 0.0, sync: 0.0 });
            let (n, sum) = by_local.entry(local.to_bits()).or_insert(zero);
            *n += 1.0;
            sum.step += time.step;
            sum.sync += time.sync;
        }
    }
    let point =
        |((n_nodes, n_replicas), by_local): ((usize, u32), BTreeMap<u64, (f64, StepTime)>)| {
            let mean = |(local, (n, sum)): (u64, (f64, StepTime))| {
                (f64::from_bits(local), StepTime { step: sum.step / n, sync: sum.sync / n })
            };
            GridPoint {
                n_nodes: n_nodes as f64,
                n_replicas: n_replicas.into(),
                curve: by_local.into_iter().map(mean).collect(),
            }
        };
    sums.into_iter().map(point).collect()
}

/// Linear between measured batches; constant beyond them.
fn on_curve(curve: &Curve, local: f64) -> StepTime {
    let after = curve.partition_point(|(bsz, _)| *bsz < local);
    let (Some(above), below) = (curve.get(after), after.checked_sub(1)) else {
        return curve.last().map_or(StepTime { step: 1.0, sync: 0.0 }, |(_, time)| *time);
    };
    let Some(below) = below.map(|at| curve[at]) else { return above.1 };
    let share = (local - below.0) / (above.0 - below.0);
    StepTime {
        step: share * above.1.step + (1.0 - share) * below.1.step,
        sync: share * above.1.sync + (1.0 - share) * below.1.sync,
    }
}

fn smallest_rotation(workers: &[u32]) -> Vec<u32> {
    let turned = |by: usize| [&workers[by..], &workers[..by]].concat();
    (0..workers.len()).map(turned).min().unwrap_or_default()
}

/// Delaunay triangles: those whose circumcircle contains no other point. There are at most a few
/// hundred points, so all triples are tried. Squares are split in both ways.
fn triangulate(grid: &[GridPoint]) -> Vec<[usize; 3]> {
    let mut triangles = Vec::new();
    for a in 0..grid.len() {
        for b in a + 1..grid.len() {
            for c in b + 1..grid.len() {
                if is_delaunay(grid, [a, b, c]) {
                    triangles.push([a, b, c]);
                }
            }
        }
    }
    triangles
}

fn is_delaunay(grid: &[GridPoint], [a, b, c]: [usize; 3]) -> bool {
    let at = |point: usize| (grid[point].n_nodes, grid[point].n_replicas);
    let ((ax, ay), (bx, by), (cx, cy)) = (at(a), at(b), at(c));
    let twice = 2.0 * (ax * (by - cy) + bx * (cy - ay) + cx * (ay - by));
    if twice.abs() < 1e-9 {
        return false;
    }
    let (aa, bb, cc) = (ax * ax + ay * ay, bx * bx + by * by, cx * cx + cy * cy);
    let x = (aa * (by - cy) + bb * (cy - ay) + cc * (ay - by)) / twice;
    let y = (aa * (cx - bx) + bb * (ax - cx) + cc * (bx - ax)) / twice;
    let radius = (ax - x).powi(2) + (ay - y).powi(2);
    let is_inside = |point: usize| {
        let (px, py) = at(point);
        (px - x).powi(2) + (py - y).powi(2) < radius - 1e-7
    };
    !(0..grid.len()).any(is_inside)
}

/// The weight of each corner at a point inside a triangle; none outside.
fn weights_in(grid: &[GridPoint], [a, b, c]: [usize; 3], x: f64, y: f64) -> Option<[f64; 3]> {
    let at = |point: usize| (grid[point].n_nodes, grid[point].n_replicas);
    let ((ax, ay), (bx, by), (cx, cy)) = (at(a), at(b), at(c));
    let whole = (by - cy) * (ax - cx) + (cx - bx) * (ay - cy);
    let first = ((by - cy) * (x - cx) + (cx - bx) * (y - cy)) / whole;
    let second = ((cy - ay) * (x - cx) + (ax - cx) * (y - cy)) / whole;
    let weights = [first, second, 1.0 - first - second];
    weights.iter().all(|weight| *weight >= -1e-9).then_some(weights)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "batch sizes are small whole numbers"
)]
pub(super) fn whole(value: f64) -> u32 {
    value as u32
}
