// SPDX-License-Identifier: Apache-2.0
//! Time by kind, between the machine's words and the wire's.

use std::time::Duration;

use edl_core::goodput::{Kind, Spent};

use crate::proto;

impl From<Spent> for proto::Spent {
    fn from(spent: Spent) -> Self {
        let secs = |kind| spent.get(kind).as_secs_f64();
        Self {
            compute: secs(Kind::Compute),
            communicate: secs(Kind::Communicate),
            data_wait: secs(Kind::DataWait),
            redo: secs(Kind::Redo),
            heal: secs(Kind::Heal),
            checkpoint: secs(Kind::Checkpoint),
            idle: secs(Kind::Idle),
            down: secs(Kind::Down),
        }
    }
}

impl From<proto::Spent> for Spent {
    /// What is no time is none.
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
    pub fn parts(&self) -> [(Kind, f64); 8] {
        [
            (Kind::Compute, self.compute),
            (Kind::Communicate, self.communicate),
            (Kind::DataWait, self.data_wait),
            (Kind::Redo, self.redo),
            (Kind::Heal, self.heal),
            (Kind::Checkpoint, self.checkpoint),
            (Kind::Idle, self.idle),
            (Kind::Down, self.down),
        ]
    }

    /// All seconds together.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.parts().iter().map(|(_, secs)| secs).sum()
    }
}
