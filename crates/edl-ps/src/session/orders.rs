// SPDX-License-Identifier: Apache-2.0
//! What a master can order, done beside the session.

use std::path::PathBuf;
use std::sync::Arc;

use edl_core::id::{CutId, Generation};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::spec::JobSpec;
use edl_net::proto::ps_command::Kind as Order;
use edl_net::proto::ps_message::Kind as Answer;
use edl_net::proto::{
    CheckpointFile, Cut, CutDone, CutFailed, Inspect, Load, LoadFailed, Loaded, PartitionSet,
    PsMessage, Sets,
};

use crate::session::{Member, chain};
use crate::store::{LoadSpec, PartitionState, Store};

impl Member {
    /// Starts what the master orders.
    pub(super) fn obey(&mut self, order: Order) {
        let store = Arc::clone(&self.store);
        match order {
            Order::Welcome(_) => {
                if let Some(job) = self.control.job() {
                    self.front.set_run(job.run);
                }
            }
            Order::Load(order) => {
                let Some(job) = self.control.job() else { return };
                let (spec, job_dir) = (job.spec.clone(), self.config.job_dir.clone());
                self.start(move || load(&store, &spec, job_dir, order));
            }
            Order::Cut(order) => self.start(move || cut(&store, order)),
            Order::Inspect(Inspect { request }) => self.start(move || {
                let (generation, states) = store.inspect();
                Answer::Sets(Sets { request, generation: generation.0, sets: sets(states) })
            }),
            Order::Serve(serve) => match store.serve(Generation(serve.generation)) {
                Ok(()) => tracing::info!(generation = serve.generation, "serving"),
                // The master learns it from our next hello or heartbeat and loads again.
                Err(error) => tracing::warn!(%error, "cannot serve"),
            },
            // Handled by `Member::run`.
            Order::Stop(_) => {}
        }
    }

    fn start(&mut self, order: impl FnOnce() -> Answer + Send + 'static) {
        self.orders.spawn_blocking(move || PsMessage { kind: Some(order()) });
    }
}

/// The generation held and the state of its partitions.
pub(super) async fn inspect(store: &Arc<Store>) -> (Generation, Vec<PartitionSet>) {
    let store = Arc::clone(store);
    let inspected = tokio::task::spawn_blocking(move || store.inspect()).await;
    let (generation, states) = inspected.unwrap_or_default();
    (generation, sets(states))
}

fn load(store: &Store, spec: &JobSpec, job_dir: PathBuf, order: Load) -> Answer {
    let generation = order.generation;
    let loaded = load_spec(spec, job_dir, order).and_then(|load| {
        store.load(&load).map_err(|error| chain(&error))?;
        Ok(load.partitions)
    });
    match loaded {
        Ok(partitions) => {
            let (held, states) = store.inspect();
            if held.0 != generation {
                let error = "another generation was loaded in the meantime".into();
                return Answer::LoadFailed(LoadFailed { generation, error });
            }
            tracing::info!(generation, ?partitions, "loaded");
            Answer::Loaded(Loaded { generation, sets: sets(states) })
        }
        Err(error) => {
            tracing::error!(generation, error, "cannot load");
            Answer::LoadFailed(LoadFailed { generation, error })
        }
    }
}

fn load_spec(spec: &JobSpec, job_dir: PathBuf, order: Load) -> Result<LoadSpec, String> {
    let model: ModelSpec = serde_json::from_str(&order.model_spec_json)
        .map_err(|error| format!("cannot parse the model's description: {error}"))?;
    let optimizer = serde_json::from_str(&order.optimizer_json)
        .map_err(|error| format!("cannot parse the optimizer's description: {error}"))?;
    let (dense_len, n_partitions) = (model.dense_len(), order.n_partitions);
    let layout = Layout { dense_len, n_partitions, is_apart: spec.is_hybrid() };
    Ok(LoadSpec {
        generation: Generation(order.generation),
        partitions: order.first_partition..order.end_partition,
        layout,
        model: Arc::new(model),
        optimizer,
        seed: spec.seed,
        n_batches: order.n_batches,
        mode: spec.mode(),
        lr_staleness_modulation: spec.lr_staleness_modulation,
        job_dir,
        checkpoint: (!order.checkpoint.is_empty()).then(|| PathBuf::from(order.checkpoint)),
        keep_applied: order.keep_applied,
    })
}

fn cut(store: &Store, order: Cut) -> Answer {
    let Cut { cut, generation, folder, at } = order;
    match store.cut(Generation(generation), folder.as_ref(), at) {
        Ok(files) => {
            let file = |file: edl_tensor::checkpoint::FileEntry| CheckpointFile {
                partition: file.partition.0,
                name: file.name,
                bytes: file.bytes,
                checksum: file.checksum,
                updates: file.updates,
            };
            let files = files.into_iter().map(file).collect();
            Answer::CutDone(CutDone { cut, generation, files })
        }
        Err(error) => {
            let error = chain(&error);
            tracing::warn!(cut = %CutId(cut), error, "cannot write a checkpoint");
            Answer::CutFailed(CutFailed { cut, generation, error })
        }
    }
}

fn sets(states: Vec<PartitionState>) -> Vec<PartitionSet> {
    let set = |state: PartitionState| PartitionSet {
        partition: state.partition.0,
        applied: state.applied,
        updates: state.updates,
        n_rows: state.n_rows,
        version: state.version,
    };
    states.into_iter().map(set).collect()
}
