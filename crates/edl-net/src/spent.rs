// SPDX-License-Identifier: Apache-2.0
//! Time accounting on the wire.

use std::time::Duration;

use edl_core::goodput::{Spent, TimeKind, TimeReport};

use crate::proto;

impl From<Spent> for proto::Spent {
    fn from(spent: Spent) -> Self {
        let secs = |kind| spent.get(kind).as_secs_f64();
        Self {
            compute: secs(TimeKind::Compute),
            communicate: secs(TimeKind::Communicate),
            data_wait: secs(TimeKind::DataWait),
            redo: secs(TimeKind::Redo),
            heal: secs(TimeKind::Heal),
            checkpoint: secs(TimeKind::Checkpoint),
            idle: secs(TimeKind::Idle),
            down: secs(TimeKind::Down),
        }
    }
}

impl From<TimeReport> for proto::Spending {
    fn from(TimeReport { spent, last, step, records }: TimeReport) -> Self {
        Self { spent: Some(spent.into()), last: last.into(), step, load: None, records }
    }
}

impl From<proto::Spent> for Spent {
    /// Invalid durations count as zero.
    fn from(spent: proto::Spent) -> Self {
        let mut all = Self::default();
        for (kind, secs) in spent.parts() {
            all.add(kind, Duration::try_from_secs_f64(secs).unwrap_or_default());
        }
        all
    }
}

impl proto::Spent {
    /// Seconds by kind, in the order of reports.
    #[must_use]
    pub fn parts(&self) -> [(TimeKind, f64); 8] {
        [
            (TimeKind::Compute, self.compute),
            (TimeKind::Communicate, self.communicate),
            (TimeKind::DataWait, self.data_wait),
            (TimeKind::Redo, self.redo),
            (TimeKind::Heal, self.heal),
            (TimeKind::Checkpoint, self.checkpoint),
            (TimeKind::Idle, self.idle),
            (TimeKind::Down, self.down),
        ]
    }

    /// All seconds together.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.parts().iter().map(|(_, secs)| secs).sum()
    }
}
