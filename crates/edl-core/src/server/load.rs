// SPDX-License-Identifier: Apache-2.0
//! Loads: which partitions a server creates, from what, and in which generation.

use std::ops::Range;
use std::sync::Arc;

use super::held::Held;
use super::{Effect, Error, Inspection, Loading, Phase, Progress, Report, Server};
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
            Phase::Held(held) if held.generation == asked => self.inspect(Inspection::Load),
            // Its report will follow.
            Phase::Loading { load, next: None } if load.generation == asked => {}
            Phase::Loading { next: Some(next), .. } if next.generation == asked => {}
            Phase::Loading { next, .. } => {
                if let Some(before) = next.replace(load) {
                    self.report_load_failed(before.generation, Error::Superseded.to_string());
                }
                self.review();
            }
            Phase::Held(_) | Phase::Empty | Phase::Failed(_) | Phase::Stopped => {
                self.end_held();
                self.begin_load(load);
                self.review();
            }
        }
    }

    fn begin_load(&mut self, load: Box<Load>) {
        let Load { generation, mode, .. } = *load;
        let loading = Loading { generation, partitions: load.partitions.clone(), mode };
        self.phase = Phase::Loading { load: loading, next: None };
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
            Phase::Loading { load, next } if load.generation == generation => {
                if let Some(next) = next.take() {
                    self.effects.push(Effect::Drop(generation));
                    self.report_load_failed(generation, Error::Superseded.to_string());
                    return self.begin_load(next);
                }
                self.phase = Phase::Held(Held::new(load, progress));
                self.effects.push(Effect::Report(Report::Loaded { generation, states }));
                self.review();
            }
            Phase::Loading { .. }
            | Phase::Empty
            | Phase::Held(_)
            | Phase::Failed(_)
            | Phase::Stopped => self.effects.push(Effect::Drop(generation)),
        }
    }

    pub(super) fn load_failed(&mut self, generation: Generation, error: String) {
        self.report_load_failed(generation, error);
        if let Phase::Loading { load, next } = &mut self.phase
            && load.generation == generation
        {
            match next.take() {
                Some(next) => self.begin_load(next),
                None => self.phase = Phase::Failed(generation),
            }
        }
    }

    pub(super) fn report_load_failed(&mut self, generation: Generation, error: String) {
        self.effects.push(Effect::Report(Report::LoadFailed { generation, error }));
    }
}
