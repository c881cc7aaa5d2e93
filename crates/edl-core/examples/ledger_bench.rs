// SPDX-License-Identifier: Apache-2.0
//! How many leases a ledger assigns, and how many events a whole job takes, per second on one core:
//! `cargo run --release -p edl-core --example ledger_bench`.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use edl_core::activity::WaitingFor;
use edl_core::applied::AppliedSet;
use edl_core::id::{
    BatchId, Generation, Incarnation, LeaseId, PartitionId, PsId, RunId, Term, WorkerId,
};
use edl_core::job::{Command, Config, Durable, Effect, Event, Job};
use edl_core::ledger::Ledger;
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use edl_core::server;
use edl_core::servers::{PartitionState, ServerMember};
use edl_core::spec::{JobSpec, Mode};
use edl_core::time::Time;
use edl_core::worker::{Report, Task};

const N_BATCHES: u32 = 1_000_000;
const N_EVENTS: usize = 300_000;

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    let (n_leases, time) = ledger(10_000);
    writeln!(out, "ledger, 10000 workers: {:.0} leases/s", rate(n_leases, time))?;
    for (mode, grads_to_wait) in [("async", None), ("sync, rounds of 64", Some(64))] {
        for n_workers in [1_000, 10_000] {
            let (n_events, time) = job(n_workers, grads_to_wait);
            let rate = rate(n_events, time);
            writeln!(out, "job, {mode}, {n_workers} workers: {rate:.0} events/s")?;
        }
    }
    let time = restore();
    writeln!(out, "restore of {N_BATCHES} batches in 32 uneven partitions: {time:.1?}")?;
    let (n_bytes, time) = restart();
    writeln!(
        out,
        "master restart at 10^9 records in 128 partitions of 4 servers, 1000 workers: {time:.1?}, \
         {n_bytes} bytes of sets"
    )
}

#[expect(clippy::cast_precision_loss, reason = "a number for people")]
fn rate(n: usize, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64()
}

#[expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

/// Every worker holds a lease of one batch; a worker that finishes gets the next.
fn ledger(n_workers: u32) -> (usize, Duration) {
    let mut ledger = Ledger::new(N_BATCHES, 1, Mode::Async);
    timed(|| {
        let mut held = VecDeque::new();
        let mut n_leases = 0;
        for number in 0..u64::from(N_BATCHES) {
            if held.len() == n_workers as usize {
                let (worker, batch) = held.pop_front().expect("some worker has work");
                ledger.pool_mut().extend(worker, Time::ZERO);
                assert!(ledger.done(batch));
            }
            let worker = WorkerId(u32::try_from(number).expect("few batches") % n_workers);
            let assigned = ledger.assign(LeaseId(number), worker, n_workers, u64::MAX, Time::ZERO);
            let Some((epoch, range)) = assigned else { break };
            held.extend(range.map(|index| (worker, BatchId { epoch, index })));
            n_leases += 1;
        }
        n_leases
    })
}

/// Every batch is reported as soon as it is assigned; each report is one event.
fn job(n_workers: u32, grads_to_wait: Option<u32>) -> (usize, Duration) {
    let spec = JobSpec {
        job_name: "bench".into(),
        minibatch_size: 1,
        num_minibatches_per_task: 1,
        num_epochs: 0,
        num_workers: n_workers,
        partitions: 1,
        grads_to_wait,
        checkpoint_secs: 0,
        // No worker counts as silent here, although most send nothing.
        heartbeat_timeout_secs: 1e6,
        task_timeout_secs: 1_000_000,
        ..JobSpec::default()
    };
    let config = Config {
        spec,
        run: RunId::default(),
        term: Term(1),
        n_records: u64::from(N_BATCHES),
        n_validation_records: 0,
        n_prediction_records: 0,
        output: String::new(),
        evaluated_version: 0,
    };
    let mut job = Job::new(config, Durable::default(), Time::ZERO);
    let mut assigned = VecDeque::new();
    start(&mut job, n_workers, &mut assigned);
    timed(|| {
        for number in 0..N_EVENTS {
            // Twenty thousand events are a second, so that ticks are part of the price.
            let now = Time::since_origin(Duration::from_micros(100 * number as u64));
            let (worker, batch) = assigned.pop_front().expect("there is always work");
            let generation = Generation(1);
            let incarnation = Incarnation(u64::from(worker.0));
            let report = Report::BatchDone { batch, generation, loss: 0.5 };
            let done = Event::FromWorker { worker, incarnation, report };
            take_leases(job.handle(done, now), &mut assigned);
            let (waiting_for, progress) = (WaitingFor::Nothing, number as u64);
            let report = Report::Heartbeat { waiting_for, progress };
            job.handle(Event::FromWorker { worker, incarnation, report }, now);
        }
        2 * N_EVENTS
    })
}

fn start(job: &mut Job, n_workers: u32, assigned: &mut VecDeque<(WorkerId, BatchId)>) {
    let model = ModelSpec {
        name: "none".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: OptimizerSpec::sgd(1.0),
    };
    for id in 0..n_workers {
        let (worker, incarnation) = (WorkerId(id), Incarnation(u64::from(id)));
        job.handle(Event::WorkerConnected { worker, incarnation, pid: id }, Time::ZERO);
        let (model, held) = (Box::new(model.clone()), Vec::new());
        let report = Report::Ready { model, capacity: 2, held, peer: None };
        job.handle(Event::FromWorker { worker, incarnation, report }, Time::ZERO);
    }
    let member = ServerMember {
        incarnation: Incarnation(1),
        address: String::new(),
        unix_path: String::new(),
        generation: Generation(0),
        sets: Vec::new(),
    };
    let (ps, member) = (PsId(0), Box::new(member));
    job.handle(Event::PsConnected { ps, pid: 1, member }, Time::ZERO);
    let applied = AppliedSet::new(N_BATCHES);
    let state = PartitionState { partition: PartitionId(0), applied, updates: 0, n_rows: 0 };
    let report = server::Report::Loaded { generation: Generation(1), states: vec![state] };
    let loaded = Event::FromPs { ps, incarnation: Incarnation(1), report };
    take_leases(job.handle(loaded, Time::ZERO), assigned);
}

fn take_leases(effects: Vec<Effect>, assigned: &mut VecDeque<(WorkerId, BatchId)>) {
    for effect in effects {
        if let Effect::ToWorker(worker, Command::Lease { task, .. }) = effect
            && let Task::Train { epoch, indices, .. } = task
        {
            assigned.extend(indices.map(|index| (worker, BatchId { epoch, index })));
        }
    }
}

/// What a lost server costs the master: the AND of all sets, and a new ledger.
fn restore() -> Duration {
    let sets: Vec<AppliedSet> = (0..32).map(uneven).collect();
    let mut ledger = Ledger::new(N_BATCHES, 8, Mode::Async);
    let (n_done, time) = timed(|| {
        let first = sets[0].clone();
        let done = sets.iter().fold(first, |done, set| done.and(set));
        ledger.restore(&done, None);
        ledger.n_done()
    });
    assert!(n_done > 0);
    time
}

/// What a new master does with the sets of servers that kept their memory: half of 10^9 batches of
/// one record, of which 1000 workers have eight each in progress.
fn restart() -> (usize, Duration) {
    const N_RECORDS: u32 = 1_000_000_000;
    let set = |partition: u32| {
        let mut set = AppliedSet::of_first(u64::from(N_RECORDS) / 2, N_RECORDS);
        let first = |worker: u32| N_RECORDS / 2 + 16 * worker + partition % 8;
        let some = (0..1_000).flat_map(|worker| first(worker)..N_RECORDS / 2 + 16 * worker + 8);
        some.for_each(|index| assert!(set.insert(BatchId { epoch: 0, index })));
        set
    };
    let servers: Vec<Vec<AppliedSet>> =
        (0..4).map(|ps| (32 * ps..32 * ps + 32).map(set).collect()).collect();
    let (n_bytes, time) = timed(|| {
        let mut n_bytes = 0;
        let spec = JobSpec {
            job_name: "bench".into(),
            minibatch_size: 1,
            num_ps_pods: 4,
            partitions: 128,
            ..JobSpec::default()
        };
        let config = Config {
            spec,
            run: RunId::default(),
            term: Term(2),
            n_records: N_RECORDS.into(),
            n_validation_records: 0,
            n_prediction_records: 0,
            output: String::new(),
            evaluated_version: 0,
        };
        let durable = Durable { generation: Generation(1), ..Durable::default() };
        let mut job = Job::new(config, durable, Time::ZERO);
        for (ps, sets) in (0..).zip(&servers) {
            let mut before: Option<AppliedSet> = None;
            let states = sets.iter().zip(32 * ps..).map(|(set, partition)| {
                let bytes = set.to_bytes(before.as_ref());
                n_bytes += bytes.len();
                let applied = AppliedSet::from_bytes(&bytes, before.as_ref()).expect("its bytes");
                before = Some(applied.clone());
                let updates = applied.len();
                PartitionState { partition: PartitionId(partition), applied, updates, n_rows: 0 }
            });
            let member = ServerMember {
                incarnation: Incarnation(u64::from(ps)),
                address: String::new(),
                unix_path: String::new(),
                generation: Generation(1),
                sets: states.collect(),
            };
            let member = Box::new(member);
            job.handle(Event::PsConnected { ps: PsId(ps), pid: 1, member }, Time::ZERO);
        }
        assert!(job.ledger().n_done() > u64::from(N_RECORDS) / 2, "no server is lost");
        n_bytes
    });
    (n_bytes, time)
}

/// Half of an epoch, except for a few batches.
fn uneven(partition: u32) -> AppliedSet {
    let mut set = AppliedSet::new(N_BATCHES);
    for index in (0..N_BATCHES / 2).filter(|index| index % 997 != partition) {
        set.insert(BatchId { epoch: 0, index });
    }
    set
}
