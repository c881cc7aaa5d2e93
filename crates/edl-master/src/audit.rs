// SPDX-License-Identifier: Apache-2.0
//! The proof of exactly once, for a running job and for one that has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use edl_core::audit::{Audit, audit};
use edl_core::batch::BatchPlan;
use edl_core::id::{BatchId, Generation, PsId};
use edl_core::servers::PartitionState;
use edl_core::spec::{JobSpec, Mode};
use edl_net::proto::{self, PsCommand, ps_command};
use edl_tensor::checkpoint::{self, Checkpoint, Manifest};
use edl_tensor::partition::PartitionConfig;
use tokio::sync::oneshot;
use tonic::Status;

use crate::engine::Engine;

type Reply = oneshot::Sender<Result<proto::AuditReport, Status>>;

/// Questions that wait for the servers' answers.
#[derive(Default)]
pub(crate) struct Audits {
    next: u64,
    open: BTreeMap<u64, PendingAudit>,
}

struct PendingAudit {
    reply: Reply,
    waiting: BTreeSet<PsId>,
    states: Vec<PartitionState>,
}

impl Audits {
    /// A server is gone: those who wait for it hear so.
    pub(crate) fn lost(&mut self, ps: PsId) {
        for (_, open) in self.open.extract_if(.., |_, open| open.waiting.contains(&ps)) {
            let why = format!("ps-{ps} disconnected before it answered; try again in a moment");
            let _ = open.reply.send(Err(Status::unavailable(why)));
        }
    }
}

impl Engine {
    /// Asks every server for the state of its partitions.
    pub(crate) fn begin_audit(&mut self, reply: Reply) {
        if self.config.spec.step_lanes().is_some() {
            return self.audit_checkpoint(reply);
        }
        if !self.job.servers().is_serving() {
            let why = "the parameter servers are loading; try again in a moment";
            let _ = reply.send(Err(Status::unavailable(why)));
            return;
        }
        self.audits.next += 1;
        let request = self.audits.next;
        // A caller may have hung up since.
        self.audits.open.retain(|_, open| !open.reply.is_closed());
        let waiting: BTreeSet<PsId> = self.servers.keys().collect();
        for ps in &waiting {
            let kind = ps_command::Kind::Inspect(proto::Inspect { request });
            self.servers.send(*ps, PsCommand { kind: Some(kind) });
        }
        self.audits.open.insert(request, PendingAudit { reply, waiting, states: Vec::new() });
    }

    /// Under AllReduce a checkpoint is the whole state after one step, so its records are those of
    /// the job up to there.
    fn audit_checkpoint(&self, reply: Reply) {
        let checkpoints = &self.job.durable().checkpoints;
        let Some(last) = checkpoints.iter().rev().find(|checkpoint| !checkpoint.is_bad) else {
            let why = "no checkpoint yet; try again after the first one";
            let _ = reply.send(Err(Status::unavailable(why)));
            return;
        };
        let folder = self.checkpoints.path(&last.folder);
        let (spec, n_records) = (self.config.spec.clone(), self.data.n_records);
        // The caller waits for it; the loop does not.
        tokio::task::spawn_blocking(move || {
            let report = of_checkpoint(&spec, n_records, &folder);
            let _ = reply.send(report.map_err(|error| Status::unavailable(error.to_string())));
        });
    }

    pub(crate) fn answer_audit(
        &mut self,
        ps: PsId,
        request: u64,
        generation: Generation,
        states: Vec<PartitionState>,
    ) {
        // The caller has hung up, or asked an earlier master.
        let Some(open) = self.audits.open.get_mut(&request) else { return };
        open.states.extend(states);
        open.waiting.remove(&ps);
        if !open.waiting.is_empty() {
            return;
        }
        let open = self.audits.open.remove(&request).expect("just seen");
        let plan = self.config.spec.plan(self.data.n_records);
        let (name, n_epochs) = (self.config.spec.job_name.clone(), self.job.ledger().epoch());
        let skipped = self.job.durable().skipped.clone();
        // The caller waits for it; the loop does not.
        tokio::task::spawn_blocking(move || {
            let report = report(&name, &plan, &open.states, &skipped, n_epochs, generation.0);
            let _ = open.reply.send(Ok(report));
        });
    }
}

/// The audit of a checkpoint: what an ended job has left.
pub fn of_checkpoint(
    spec: &JobSpec,
    n_records: u64,
    folder: &Path,
) -> Result<proto::AuditReport, checkpoint::Error> {
    let Checkpoint { manifest, .. } = Checkpoint::open(folder)?;
    let layout = manifest.layout();
    let model = Arc::new(manifest.model.clone());
    let mut states = Vec::new();
    for entry in &manifest.files {
        let config = PartitionConfig {
            id: entry.partition,
            layout,
            model: Arc::clone(&model),
            optimizer: manifest.optimizer.clone(),
            seed: manifest.seed,
            n_batches: manifest.n_batches,
            mode: Mode::Async,
            lr_staleness_modulation: false,
        };
        let partition = checkpoint::read_partition(folder, entry, config, true)?;
        states.push(PartitionState {
            partition: entry.partition,
            applied: partition.applied().clone(),
            updates: partition.updates(),
            n_rows: partition.n_rows(),
        });
    }
    let plan = spec.plan(n_records);
    let n_epochs = states.iter().map(|state| state.applied.epoch()).min().unwrap_or(0);
    let Manifest { skipped, generation, .. } = &manifest;
    Ok(report(&spec.job_name, &plan, &states, skipped, n_epochs, generation.0))
}

fn report(
    job: &str,
    plan: &BatchPlan,
    states: &[PartitionState],
    skipped: &BTreeSet<BatchId>,
    n_epochs: u32,
    generation: u64,
) -> proto::AuditReport {
    let Audit { n_records, epochs, is_clean } = audit(plan, states, n_epochs);
    let epoch = |e: &edl_core::audit::EpochAudit| proto::EpochAudit {
        epoch: e.epoch,
        records: e.records,
        missing: e.missing,
        duplicated: e.duplicated,
        finished: e.is_finished,
    };
    let partition = |state: &PartitionState| proto::PartitionAudit {
        partition: state.partition.0,
        updates: state.updates,
        applied: state.applied.len(),
    };
    // Those that a checkpoint does not include yet are not part of what is audited.
    let is_applied = |batch: &&BatchId| states.iter().all(|state| state.applied.contains(**batch));
    let skipped_batch = |batch: &BatchId| proto::SkippedBatch {
        epoch: batch.epoch,
        index: batch.index,
        records: plan.n_records_of(batch.index).into(),
    };
    proto::AuditReport {
        job: job.into(),
        n_records,
        generation,
        epochs: epochs.iter().map(epoch).collect(),
        partitions: states.iter().map(partition).collect(),
        clean: is_clean,
        skipped: skipped.iter().filter(is_applied).map(skipped_batch).collect(),
    }
}

#[test]
fn an_audit_is_answered_when_a_server_disconnects() {
    let (reply, mut answer) = oneshot::channel();
    let open = PendingAudit { reply, waiting: [PsId(1)].into(), states: Vec::new() };
    let mut audits = Audits { next: 1, open: [(1, open)].into() };
    audits.lost(PsId(0));
    assert!(answer.try_recv().is_err(), "it has answered");
    audits.lost(PsId(1));
    let status = answer.try_recv().unwrap().unwrap_err();
    let expected = "ps-1 disconnected before it answered; try again in a moment";
    assert_eq!((status.code(), status.message()), (tonic::Code::Unavailable, expected));
}
