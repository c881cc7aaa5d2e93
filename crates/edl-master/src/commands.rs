// SPDX-License-Identifier: Apache-2.0
//! What workers and servers are told, as messages.

use std::ops::Range;

use edl_core::id::{Generation, PsId, WorkerId};
use edl_core::job::{Command, LoadFrom, PsOrder};
use edl_core::optimizer;
use edl_core::world::{Member, World};
use edl_net::proto::{self, PsCommand, WorkerCommand, ps_command, worker_command};
use serde::Serialize;

use crate::convert;
use crate::engine::Engine;

impl Engine {
    pub(crate) fn tell_worker(&mut self, worker: WorkerId, command: Command) {
        use worker_command::Kind;
        let kind = match command {
            Command::Welcome => Kind::Welcome(proto::WorkerWelcome {
                term: self.job.config().term.0,
                run: self.run.to_string(),
                spec_json: json(&self.config.spec),
                n_records: self.data.n_records,
                n_validation_records: self.data.n_validation_records,
                n_prediction_records: self.data.n_prediction_records,
                heartbeat_secs: self.heartbeat_secs(),
            }),
            Command::Route => Kind::Route(convert::route(self.job.servers(), self.layout())),
            Command::Lease { lease, timeout, work } => {
                let output = self.output();
                convert::lease(lease, timeout, work, &output.to_string_lossy())
            }
            Command::Revoke(lease) => Kind::Revoke(proto::Revoke { lease: lease.0 }),
            Command::World { world, until, generation, load } => {
                Kind::World(self.world(world, until, generation, load))
            }
            Command::Go { world, until } => Kind::Go(proto::Go { world: world.0, until }),
            Command::Cut { cut, generation, folder, at, partitions } => Kind::Cut(proto::CutAt {
                cut: cut.0,
                generation: generation.0,
                folder: self.checkpoints.path(&folder).to_string_lossy().into_owned(),
                at,
                first_partition: partitions.start,
                end_partition: partitions.end,
            }),
            Command::Stop(reason) => Kind::Stop(proto::StopWork { reason }),
        };
        self.workers.send(worker, WorkerCommand { kind: Some(kind) });
    }

    pub(crate) fn tell_ps(&mut self, ps: PsId, order: PsOrder) {
        use ps_command::Kind;
        let kind = match order {
            PsOrder::Welcome => Kind::Welcome(proto::PsWelcome {
                term: self.job.config().term.0,
                run: self.run.to_string(),
                spec_json: json(&self.config.spec),
                heartbeat_secs: self.heartbeat_secs(),
            }),
            PsOrder::Load { generation, from } => {
                let hosted = self.layout().hosted(ps, self.config.spec.num_ps_pods);
                let Some(load) = self.load(hosted, generation, from) else {
                    return;
                };
                Kind::Load(load)
            }
            PsOrder::Serve { generation } => Kind::Serve(proto::Serve { generation: generation.0 }),
            PsOrder::Cut { cut, generation, folder, at } => Kind::Cut(proto::Cut {
                cut: cut.0,
                generation: generation.0,
                folder: self.checkpoints.path(&folder).to_string_lossy().into_owned(),
                at,
            }),
            PsOrder::Stop(reason) => Kind::Stop(proto::StopWork { reason }),
        };
        self.servers.send(ps, PsCommand { kind: Some(kind) });
    }

    fn world(
        &self,
        world: World,
        until: u64,
        generation: Generation,
        load: Option<LoadFrom>,
    ) -> proto::World {
        let member = |member: Member| {
            let peer = self.job.peer(member.worker);
            proto::Member {
                worker: member.worker.0,
                incarnation: member.incarnation.0,
                address: peer.map(|peer| peer.address.clone()).unwrap_or_default(),
                unix_path: peer.map(|peer| peer.unix_path.clone()).unwrap_or_default(),
                first_lane: member.lanes.start,
                end_lane: member.lanes.end,
                has_state: member.has_state,
            }
        };
        let all = self.layout().with_segments();
        proto::World {
            world: world.id.0,
            members: world.members.into_iter().map(member).collect(),
            after: world.after,
            until,
            generation: generation.0,
            load: load.and_then(|from| self.load(all, generation, from)),
        }
    }

    fn load(
        &self,
        hosted: Range<u32>,
        generation: Generation,
        LoadFrom { checkpoint, keep_applied }: LoadFrom,
    ) -> Option<proto::Load> {
        let model = self.job.durable().model.as_ref()?;
        let optimizer = match optimizer::resolve(&self.config.spec, model) {
            Ok(optimizer) => optimizer,
            Err(error) => {
                // The machine ends the job when a worker announces its model.
                tracing::error!(%error, "invalid optimizer");
                return None;
            }
        };
        let layout = self.layout();
        let folder = checkpoint.map(|folder| self.checkpoints.source(&folder, keep_applied));
        Some(proto::Load {
            generation: generation.0,
            first_partition: hosted.start,
            end_partition: hosted.end,
            n_partitions: layout.n_partitions,
            model_spec_json: json(model),
            optimizer_json: json(&optimizer),
            n_batches: self.checkpoints.n_batches(),
            checkpoint: folder.unwrap_or_default(),
            keep_applied,
        })
    }

    fn heartbeat_secs(&self) -> f64 {
        (self.config.spec.heartbeat_timeout_secs / 5.0).min(1.0)
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("our own types have a JSON form")
}
