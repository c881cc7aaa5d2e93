// SPDX-License-Identifier: Apache-2.0
//! The proof of exactly once, for a running job and for one that has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use edl_core::audit::{Audit, audit};
use edl_core::batch::BatchPlan;
use edl_core::id::PsId;
use edl_core::servers::PartitionState;
use edl_core::spec::{JobSpec, Mode};
use edl_net::proto::{self, PsCommand, ps_command};
use edl_tensor::checkpoint::{self, Checkpoint};
use edl_tensor::partition::PartitionConfig;
use tokio::sync::oneshot;
use tonic::Status;

use crate::convert;
use crate::engine::Engine;

type Reply = oneshot::Sender<Result<proto::AuditReport, Status>>;

/// Questions that wait for the servers' answers.
#[derive(Default)]
pub(crate) struct Audits {
    next: u64,
    open: BTreeMap<u64, Open>,
}

struct Open {
    reply: Reply,
    waiting: BTreeSet<PsId>,
    states: Vec<PartitionState>,
}

impl Engine {
    /// Asks every server for its books.
    pub(crate) fn begin_audit(&mut self, reply: Reply) {
        if self.config.spec.is_allreduce() {
            return self.audit_checkpoint(reply);
        }
        if !self.job.servers().is_serving() {
            let why = "the parameter servers are loading; try again in a moment";
            let _ = reply.send(Err(Status::unavailable(why)));
            return;
        }
        self.audits.next += 1;
        let request = self.audits.next;
        // Whoever asked may have hung up since.
        self.audits.open.retain(|_, open| !open.reply.is_closed());
        let waiting: BTreeSet<PsId> = self.servers.keys().collect();
        for ps in &waiting {
            let kind = ps_command::Kind::Inspect(proto::Inspect { request });
            self.servers.send(*ps, PsCommand { kind: Some(kind) });
        }
        self.audits.open.insert(request, Open { reply, waiting, states: Vec::new() });
    }

    /// Under AllReduce a checkpoint is the whole state after one step, so its books are those of
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
        // Whoever asked waits for it; the loop does not.
        tokio::task::spawn_blocking(move || {
            let report = of_checkpoint(&spec, n_records, &folder);
            let _ = reply.send(report.map_err(|error| Status::unavailable(error.to_string())));
        });
    }

    pub(crate) fn answer_audit(&mut self, ps: PsId, sets: proto::Sets) {
        let Some(open) = self.audits.open.get_mut(&sets.request) else { return };
        match convert::partition_states(sets.sets) {
            Ok(states) => open.states.extend(states),
            Err(error) => tracing::warn!(%error, ps = ps.0, "cannot parse a server's audit reply"),
        }
        open.waiting.remove(&ps);
        if !open.waiting.is_empty() {
            return;
        }
        let open = self.audits.open.remove(&sets.request).expect("just seen");
        let plan = self.config.spec.plan(self.data.n_records);
        let n_epochs = self.job.ledger().epoch();
        let report =
            report(&self.config.spec.job_name, &plan, &open.states, n_epochs, sets.generation);
        let _ = open.reply.send(Ok(report));
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
    Ok(report(&spec.job_name, &plan, &states, n_epochs, manifest.generation.0))
}

fn report(
    job: &str,
    plan: &BatchPlan,
    states: &[PartitionState],
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
    proto::AuditReport {
        job: job.into(),
        n_records,
        generation,
        epochs: epochs.iter().map(epoch).collect(),
        partitions: states.iter().map(partition).collect(),
        clean: is_clean,
    }
}
