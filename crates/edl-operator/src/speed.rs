// SPDX-License-Identifier: Apache-2.0
//! The speed of a job by number of workers, as its master reports it.

use std::collections::BTreeMap;

use edl_core::job::JobState;
use edl_kube::note::StatusNote;
use edl_sched::speed::{Curve, Speed};

/// Records per second by number of workers, the newest measurement of each.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Measured(BTreeMap<u32, f64>);

impl Measured {
    /// Records the reported speed, if all `granted` workers are running.
    pub(crate) fn record(&mut self, note: &StatusNote, granted: u32) {
        let speed = note.records_per_second.filter(|speed| speed.is_finite() && *speed > 0.0);
        if let Some(speed) = speed
            && note.state == JobState::Running
            && note.workers == granted
            && granted > 0
        {
            self.0.insert(granted, speed);
        }
    }

    /// The curve; none before the first measurement, or if the job has no end.
    #[must_use]
    pub(crate) fn speed(&self, note: &StatusNote) -> Option<Speed> {
        let measured_to = *self.0.keys().next_back()?;
        let remaining = note.records_total.filter(|total| *total > 0)?;
        let remaining = remaining.saturating_sub(note.records_done);
        let curve = Curve::Measured(self.0.clone());
        // Measurements do not tell one node from several.
        Some(Speed {
            together: curve.clone(),
            apart: curve,
            remaining: remaining as f64,
            measured_to,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(workers: u32, speed: f64) -> StatusNote {
        StatusNote {
            state: JobState::Running,
            records_done: 100,
            records_total: Some(1000),
            records_per_second: Some(speed),
            workers,
            ..StatusNote::default()
        }
    }

    #[test]
    fn a_speed_counts_only_when_all_granted_workers_run() {
        let mut measured = Measured::default();
        assert_eq!(measured.speed(&note(2, 10.0)), None);
        measured.record(&note(1, 5.0), 2);
        assert_eq!(measured.speed(&note(2, 10.0)), None);
        measured.record(&note(2, 10.0), 2);
        measured.record(&note(4, 16.0), 4);
        let speed = measured.speed(&note(4, 16.0)).unwrap();
        assert_eq!((speed.remaining, speed.measured_to), (900.0, 4));
        assert_eq!(speed.together, Curve::Measured([(2, 10.0), (4, 16.0)].into()));
    }
}
