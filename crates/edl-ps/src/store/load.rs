// SPDX-License-Identifier: Apache-2.0
//! Makes the partitions of a generation, on the threads that will own them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use edl_core::id::{Generation, PartitionId};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use edl_core::spec::Mode;
use edl_tensor::checkpoint::Origin;
use edl_tensor::partition::{Partition, PartitionConfig};
use tokio::sync::watch;

use crate::owner::{Owner, Task};
use crate::progress::Progress;
use crate::store::{Error, Hosted, OWNER_QUEUE, Phase, Store, WINDOW_PATIENCE};
use crate::window::Window;

/// Which partitions to make, and from what.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    pub generation: Generation,
    pub partitions: Range<u32>,
    pub layout: Layout,
    pub model: Arc<ModelSpec>,
    pub optimizer: OptimizerSpec,
    pub seed: u64,
    /// Per epoch.
    pub n_batches: u32,
    pub mode: Mode,
    pub lr_staleness_modulation: bool,
    /// Where the model's own first values lie.
    pub job_dir: PathBuf,
    /// A complete checkpoint; `None` means first values.
    pub checkpoint: Option<PathBuf>,
    /// Whether the applied sets are taken over with the parameters.
    pub keep_applied: bool,
}

impl LoadSpec {
    fn config(&self, partition: u32) -> PartitionConfig {
        PartitionConfig {
            id: PartitionId(partition),
            layout: self.layout,
            model: Arc::clone(&self.model),
            optimizer: self.optimizer.clone(),
            seed: self.seed,
            n_batches: self.n_batches,
            mode: self.mode,
            lr_staleness_modulation: self.lr_staleness_modulation,
        }
    }

    fn check(&self) -> Result<(), Error> {
        self.model.check().map_err(Error::Model)?;
        let Self { partitions, layout, n_batches, .. } = self;
        let Range { start, end } = layout.with_rows();
        let is_within = start <= partitions.start && partitions.end <= end;
        let fits = layout.dense_len == self.model.dense_len();
        if *n_batches > 0 && partitions.start <= partitions.end && is_within && fits {
            return Ok(());
        }
        let n_partitions = layout.n_partitions;
        let (partitions, n_batches) = (partitions.clone(), *n_batches);
        Err(Error::Impossible { partitions, n_partitions, n_batches })
    }

    fn origin(&self) -> Result<Origin, Error> {
        Ok(match &self.checkpoint {
            Some(folder) => Origin::checkpoint(folder, &self.layout, self.keep_applied)?,
            None => Origin::first_values(&self.model, &self.job_dir)?,
        })
    }
}

/// An owner thread that is making its partitions.
struct Birth {
    tasks: mpsc::SyncSender<Task>,
    thread: JoinHandle<()>,
}

impl Store {
    /// Ends what is held and makes the partitions of another generation. Asked again for the
    /// generation that it holds, it keeps it as it is: what was acknowledged must not be lost.
    pub fn load(&self, spec: &LoadSpec) -> Result<(), Error> {
        let _loading = self.loading.lock().expect("a load that panicked ends the process");
        spec.check()?;
        if !self.begin_load(spec.generation)? {
            return Ok(());
        }
        let started = Instant::now();
        let made = self.make(spec);
        self.spending.loaded(started.elapsed(), self.n_owners(spec.partitions.len()));
        let mut phase = self.phase();
        if matches!(*phase, Phase::Closed) {
            return Err(Error::NotHeld(spec.generation));
        }
        let result = match made {
            Ok(hosted) => {
                *phase = Phase::Held { hosted: Arc::new(hosted), is_served: false };
                Ok(())
            }
            Err(error) => {
                *phase = Phase::Failed(spec.generation);
                Err(error)
            }
        };
        drop(phase);
        self.turned.notify_all();
        result
    }

    /// Whether there is something to do; what was held before is ended then.
    fn begin_load(&self, asked: Generation) -> Result<bool, Error> {
        let mut phase = self.phase();
        let ours = match &*phase {
            Phase::Held { hosted, .. } if hosted.generation == asked => return Ok(false),
            Phase::Held { hosted, .. } => hosted.generation,
            Phase::Loading(generation) | Phase::Failed(generation) => *generation,
            Phase::Empty => Generation(0),
            Phase::Closed => return Err(Error::NotHeld(asked)),
        };
        if asked < ours {
            return Err(Error::Older { asked, ours });
        }
        let before = std::mem::replace(&mut *phase, Phase::Loading(asked));
        drop(phase);
        self.turned.notify_all();
        if let Phase::Held { hosted, .. } = before {
            hosted.end();
        }
        Ok(true)
    }

    fn make(&self, spec: &LoadSpec) -> Result<Hosted, Error> {
        let origin = Arc::new(spec.origin()?);
        let progress = Arc::new(Progress::new(&spec.partitions));
        let (ready, births) = mpsc::channel();
        let mut owners = Vec::new();
        for range in shares(&spec.partitions, self.n_owners(spec.partitions.len())) {
            owners.push(self.start_owner(spec, range, &origin, &progress, ready.clone())?);
        }
        drop(ready);
        let born: Vec<Result<(), Error>> = births.iter().collect();
        let n_born = born.len();
        let made = born.into_iter().collect::<Result<Vec<()>, Error>>();
        if n_born != owners.len() {
            return Err(Error::OwnerEnded);
        }
        made?;
        *self.window() = match spec.mode {
            Mode::Bounded { versions } => Some(Window::new(u64::from(versions), WINDOW_PATIENCE)),
            Mode::Async | Mode::Sync { .. } | Mode::Steps { .. } => None,
        };
        let (tasks, threads) =
            owners.into_iter().map(|Birth { tasks, thread }| (tasks, thread)).unzip();
        Ok(Hosted {
            generation: spec.generation,
            partitions: spec.partitions.clone(),
            layout: spec.layout,
            dims: spec.model.tables.iter().map(|table| table.dim).collect(),
            mode: spec.mode,
            progress,
            owners: tasks,
            threads: Mutex::new(threads),
        })
    }

    fn n_owners(&self, n_partitions: usize) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let wanted = if self.threads == 0 { cores() } else { self.threads };
        wanted.min(n_partitions).max(1)
    }

    fn start_owner(
        &self,
        spec: &LoadSpec,
        range: Range<u32>,
        origin: &Arc<Origin>,
        progress: &Arc<Progress>,
        ready: mpsc::Sender<Result<(), Error>>,
    ) -> Result<Birth, Error> {
        let (tasks, queue) = mpsc::sync_channel(OWNER_QUEUE);
        let name = format!("owner-{}", range.start);
        let (spec, origin, progress) = (spec.clone(), Arc::clone(origin), Arc::clone(progress));
        let spending = Arc::clone(&self.spending);
        let guard = Guard(self.is_broken.clone());
        let run = move || {
            let _guard = guard;
            let make = |partition| Ok(origin.make(spec.config(partition))?);
            let made: Result<Vec<Partition>, Error> = range.map(make).collect();
            let partitions = match made {
                Ok(partitions) => partitions,
                Err(error) => {
                    let _ = ready.send(Err(error));
                    return;
                }
            };
            partitions.iter().for_each(|partition| progress.note(partition));
            let owner = Owner {
                partitions,
                layout: spec.layout,
                dims: spec.model.tables.iter().map(|table| table.dim).collect(),
                first_hosted: spec.partitions.start,
                mode: spec.mode,
                progress,
                spending,
                staged: BTreeMap::new(),
                cut: None,
            };
            let _ = ready.send(Ok(()));
            // Whoever waits for the births waits for the ends of this channel.
            drop((ready, origin));
            owner.run(&queue);
        };
        let thread = std::thread::Builder::new().name(name).spawn(run).map_err(Error::Thread)?;
        Ok(Birth { tasks, thread })
    }
}

/// Says that an owner panicked, whatever it was doing.
struct Guard(watch::Sender<bool>);

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.send_replace(true);
        }
    }
}

/// Cuts `partitions` into `n` ranges that differ by at most one.
fn shares(partitions: &Range<u32>, n: usize) -> impl Iterator<Item = Range<u32>> {
    let (start, len) = (u64::from(partitions.start), partitions.len() as u64);
    let cut = move |k: usize| {
        u32::try_from(start + len * k as u64 / n as u64).expect("inside the partitions")
    };
    (0..n).map(move |k| cut(k)..cut(k + 1))
}
