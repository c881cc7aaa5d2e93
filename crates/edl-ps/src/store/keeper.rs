// SPDX-License-Identifier: Apache-2.0
//! Effects that may block: stops owners and starts others, and writes copies to disk.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use edl_core::error::chain;
use edl_core::id::{CheckpointId, Generation};
use edl_core::server::{Event, Inspection, Load, Progress};
use edl_core::servers::PartitionState;
use edl_tensor::checkpoint::{self, Origin, Snapshot};
use edl_tensor::partition::{Partition, PartitionConfig};
use tokio::sync::watch;

use crate::owner::{Owner, Task};
use crate::store::{Hosted, Shared};

/// Tasks that may queue at one owner before connections wait.
const OWNER_QUEUE: usize = 32;

/// Why partitions could not be created.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("cannot start an owner thread")]
    Thread(#[source] std::io::Error),
    #[error("an owner thread exited while creating its partitions")]
    OwnerEnded,
}

/// Something for the keeper to do.
pub(super) enum KeeperTask {
    Drop(Generation),
    Load(Box<Load>),
    Copy { checkpoint: CheckpointId, at: Option<u64> },
    Inspect(Inspection, Generation),
    End,
}

/// A copy of a partition, to be written.
pub(super) struct Copy {
    pub(super) checkpoint: CheckpointId,
    pub(super) folder: String,
    pub(super) snapshot: Snapshot,
}

/// The thread that starts and stops owners.
pub(super) struct Keeper {
    pub(super) shared: Arc<Shared>,
    pub(super) threads: usize,
    pub(super) job_dir: PathBuf,
}

/// Some partitions, as their owner reports them after it has created them.
type Created = Result<Vec<(Progress, PartitionState)>, Error>;

impl Keeper {
    pub(super) fn run(self, tasks: &mpsc::Receiver<KeeperTask>) {
        for task in tasks {
            match task {
                KeeperTask::Drop(generation) => self.end(Some(generation)),
                KeeperTask::Load(load) => self.load(&Arc::new(*load)),
                KeeperTask::Copy { checkpoint, at } => self.ask(|| Task::Copy { checkpoint, at }),
                KeeperTask::Inspect(inspection, generation) => self.inspect(inspection, generation),
                KeeperTask::End => break,
            }
        }
        self.end(None);
    }

    /// Stops the owners of a generation, or of any. What is left in their queues is dropped.
    fn end(&self, generation: Option<Generation>) {
        let is_it = |hosted: &mut Arc<Hosted>| generation.is_none_or(|it| it == hosted.generation);
        let hosted = self.shared.state().hosted.take_if(is_it);
        let Some(hosted) = hosted else { return };
        for owner in &hosted.owners {
            // An owner that has stopped needs no message.
            let _ = owner.send(Task::Stop);
        }
        let threads = std::mem::take(&mut *hosted.threads.lock().expect("only handles are kept"));
        for thread in threads {
            // A panic has been reported by the thread's own guard.
            let _ = thread.join();
        }
    }

    /// Asks every owner for something.
    fn ask(&self, task: impl Fn() -> Task) {
        let hosted = self.shared.state().hosted.clone();
        for owner in hosted.iter().flat_map(|hosted| &hosted.owners) {
            let _ = owner.send(task());
        }
    }

    fn inspect(&self, inspection: Inspection, generation: Generation) {
        let (out, states) = mpsc::channel();
        self.ask(|| Task::Inspect(out.clone()));
        drop(out);
        let mut states: Vec<PartitionState> = states.iter().collect();
        states.sort_by_key(|state| state.partition);
        self.shared.handle(Event::Inspected { inspection, generation, states });
    }

    fn load(&self, load: &Arc<Load>) {
        let (generation, started) = (load.generation, Instant::now());
        let created = self.create(load);
        let n_owners = self.n_owners(load.partitions.len());
        self.shared.spending.loaded(started.elapsed(), n_owners);
        match created {
            Ok((hosted, created)) => {
                let (progress, states) = created.into_iter().unzip();
                self.shared.install(hosted, Event::Loaded { generation, progress, states });
            }
            Err(error) => {
                let error = chain(&error);
                self.shared.handle(Event::LoadFailed { generation, error });
            }
        }
    }

    fn create(&self, load: &Arc<Load>) -> Result<(Hosted, Vec<(Progress, PartitionState)>), Error> {
        let origin = Arc::new(match &load.from.checkpoint {
            Some(folder) => {
                Origin::checkpoint(folder.as_ref(), &load.layout, load.from.keep_applied)?
            }
            None => Origin::first_values(&load.model, &self.job_dir)?,
        });
        let (created, all_created) = mpsc::channel();
        let (mut owners, mut threads) = (Vec::new(), Vec::new());
        for range in shares(&load.partitions, self.n_owners(load.partitions.len())) {
            let (owner, thread) = self.start_owner(load, range, &origin, created.clone())?;
            owners.push(owner);
            threads.push(thread);
        }
        drop(created);
        let all_created: Vec<Created> = all_created.iter().collect();
        let n_created = all_created.len();
        let all_created = all_created.into_iter().collect::<Result<Vec<_>, Error>>()?;
        if n_created != owners.len() {
            return Err(Error::OwnerEnded);
        }
        let mut all_created = all_created.concat();
        all_created.sort_by_key(|(_, state)| state.partition);
        let hosted = Hosted {
            generation: load.generation,
            partitions: load.partitions.clone(),
            layout: load.layout,
            dims: load.model.tables.iter().map(|table| table.dim).collect(),
            owners,
            threads: Mutex::new(threads),
        };
        Ok((hosted, all_created))
    }

    fn n_owners(&self, n_partitions: usize) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let wanted = if self.threads == 0 { cores() } else { self.threads };
        wanted.min(n_partitions).max(1)
    }

    fn start_owner(
        &self,
        load: &Arc<Load>,
        range: Range<u32>,
        origin: &Arc<Origin>,
        created: mpsc::Sender<Created>,
    ) -> Result<(mpsc::SyncSender<Task>, JoinHandle<()>), Error> {
        let (tasks, queue) = mpsc::sync_channel(OWNER_QUEUE);
        let name = format!("owner-{}", range.start);
        let (load, origin) = (Arc::clone(load), Arc::clone(origin));
        let shared = Arc::clone(&self.shared);
        let guard = Guard(shared.is_broken.clone());
        let run = move || {
            let _guard = guard;
            let create = |partition| Ok(origin.make(PartitionConfig::of(&load, partition))?);
            let partitions: Vec<Partition> = match range.map(create).collect() {
                Ok(partitions) => partitions,
                Err(error) => {
                    let _ = created.send(Err(error));
                    return;
                }
            };
            let states = partitions.iter().map(|p| (p.progress(), p.state())).collect();
            let _ = created.send(Ok(states));
            // The keeper waits until all owners have dropped their ends of this channel.
            drop((created, origin));
            Owner::new(partitions, &load, shared).run(&queue);
        };
        let thread = std::thread::Builder::new().name(name).spawn(run).map_err(Error::Thread)?;
        Ok((tasks, thread))
    }
}

/// Writes copies of partitions, one after the other, while owners continue.
pub(super) fn write_copies(shared: &Shared, copies: &mpsc::Receiver<Option<Copy>>) {
    for Copy { checkpoint, folder, snapshot } in copies.iter().map_while(|copy| copy) {
        if !shared.is_writing(checkpoint) {
            continue;
        }
        shared.handle(match checkpoint::write_file(folder.as_ref(), &snapshot) {
            Ok(file) => Event::Written { checkpoint, file: file.into() },
            Err(error) => Event::WriteFailed { checkpoint, error: chain(&error) },
        });
    }
}

/// Reports that a thread panicked, whatever it was doing.
pub(super) struct Guard(pub(super) watch::Sender<bool>);

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.send_replace(true);
        }
    }
}

/// Divides `partitions` into `n` ranges that differ by at most one.
fn shares(partitions: &Range<u32>, n: usize) -> impl Iterator<Item = Range<u32>> {
    let (start, len) = (u64::from(partitions.start), partitions.len() as u64);
    let border = move |k: usize| {
        u32::try_from(start + len * k as u64 / n as u64).expect("inside the partitions")
    };
    (0..n).map(move |k| border(k)..border(k + 1))
}
