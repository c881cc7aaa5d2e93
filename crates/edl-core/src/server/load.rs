// SPDX-License-Identifier: Apache-2.0
//! Loads: which partitions a server creates, from what, and in which generation.

use std::ops::Range;
use std::sync::Arc;

use super::held::Held;
use super::{Effect, Error, Inspection, Loading, Progress, Report, Server, ServerPhase};
use crate::id::Generation;
use crate::job::LoadFrom;
use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::optimizer::OptimizerSpec;
use crate::servers::PartitionState;
use crate::spec::Mode;

/// An order to load, with everything that decides what the partitions hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
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
    pub from: LoadFrom,
}

impl Load {
    /// Whether the partitions exist, and fit the model.
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
        Err(Error::Layout { partitions, n_partitions, n_batches })
    }
}

impl Server {
    /// Starts a load, unless a later generation is known or this one is held already: what was
    /// acknowledged must not be lost.
    pub(super) fn load(&mut self, load: Box<Load>) {
        let asked = load.generation;
        if let Err(error) = load.check().and_then(|()| self.expect_newest(asked)) {
            return self.report_load_failed(asked, error.to_string());
        }
        match &mut self.phase {
            ServerPhase::Held(held) if held.generation == asked => self.inspect(Inspection::Load),
            // Its report will follow.
            ServerPhase::Loading { load, next: None } if load.generation == asked => {}
            ServerPhase::Loading { next: Some(next), .. } if next.generation == asked => {}
            ServerPhase::Loading { next, .. } => {
                if let Some(before) = next.replace(load) {
                    self.report_load_failed(before.generation, Error::Superseded.to_string());
                }
                self.review();
            }
            ServerPhase::Held(_)
            | ServerPhase::Empty
            | ServerPhase::Failed(_)
            | ServerPhase::Stopped => {
                self.end_held();
                self.begin_load(load);
                self.review();
            }
        }
    }

    fn begin_load(&mut self, load: Box<Load>) {
        let Load { generation, mode, .. } = *load;
        let loading = Loading { generation, partitions: load.partitions.clone(), mode };
        self.phase = ServerPhase::Loading { load: loading, next: None };
        self.effects.push(Effect::Load(load));
    }

    fn expect_newest(&self, asked: Generation) -> Result<(), Error> {
        let ours = self.newest().ok_or(Error::Stopped)?;
        if asked < ours { Err(Error::Older { asked, ours }) } else { Ok(()) }
    }

    pub(super) fn loaded(
        &mut self,
        generation: Generation,
        progress: Vec<Progress>,
        states: Vec<PartitionState>,
    ) {
        match &mut self.phase {
            ServerPhase::Loading { load, next } if load.generation == generation => {
                if let Some(next) = next.take() {
                    self.effects.push(Effect::Drop(generation));
                    self.report_load_failed(generation, Error::Superseded.to_string());
                    return self.begin_load(next);
                }
                self.phase = ServerPhase::Held(Held::new(load, progress));
                self.effects.push(Effect::Report(Report::Loaded { generation, states }));
                self.review();
            }
            ServerPhase::Loading { .. }
            | ServerPhase::Empty
            | ServerPhase::Held(_)
            | ServerPhase::Failed(_)
            | ServerPhase::Stopped => self.effects.push(Effect::Drop(generation)),
        }
    }

    pub(super) fn load_failed(&mut self, generation: Generation, error: String) {
        self.report_load_failed(generation, error);
        if let ServerPhase::Loading { load, next } = &mut self.phase
            && load.generation == generation
        {
            match next.take() {
                Some(next) => self.begin_load(next),
                None => self.phase = ServerPhase::Failed(generation),
            }
        }
    }

    pub(super) fn report_load_failed(&mut self, generation: Generation, error: String) {
        self.effects.push(Effect::Report(Report::LoadFailed { generation, error }));
    }
}
