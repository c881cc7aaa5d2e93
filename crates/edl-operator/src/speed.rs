// SPDX-License-Identifier: Apache-2.0
//! How quickly a job gets on with so many workers: what was measured, and between and beyond it a
//! guess that a plan may try out.

use std::collections::BTreeMap;

use edl_kube::note::StatusNote;
use edl_sched::snapshot::Speed;

/// Beyond what was measured, each worker is thought to add this share of what the last ones do.
const BEYOND: f64 = 0.8;

/// Records a second by number of workers, the newest measurement of each.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Measured(BTreeMap<u32, f64>);

impl Measured {
    /// Takes in what a master says, once all workers that it was told to have are at work.
    pub(crate) fn note(&mut self, note: &StatusNote, told: u32) {
        let speed = note.records_per_second.filter(|speed| speed.is_finite() && *speed > 0.0);
        if let Some(speed) = speed
            && note.state == "running"
            && note.workers == told
            && told > 0
        {
            self.0.insert(told, speed);
        }
    }

    /// The curve up to `max` workers; none before anything was measured or if there is no end.
    #[must_use]
    pub(crate) fn speed(&self, note: &StatusNote, max: u32) -> Option<Speed> {
        let measured_to = *self.0.keys().next_back()?;
        let remaining = note.records_total.filter(|total| *total > 0)?;
        let remaining = remaining.saturating_sub(note.records_done);
        let curve: Vec<f64> = (1..=max).map(|n| self.at(n)).collect();
        // Where its workers were is not measured apart from how many there were.
        Some(Speed {
            together: curve.clone(),
            apart: curve,
            remaining: remaining as f64,
            measured_to,
        })
    }

    fn at(&self, n: u32) -> f64 {
        let below = self.0.range(..=n).next_back();
        let above = self.0.range(n..).next();
        match (below, above) {
            (Some((less, slow)), Some((more, fast))) if less < more => {
                let share = f64::from(n - less) / f64::from(more - less);
                slow + (fast - slow) * share
            }
            (Some((_, exact)), Some(_)) => *exact,
            (None, Some((more, fast))) => fast * f64::from(n) / f64::from(*more),
            (Some((less, slow)), None) => {
                slow * (1.0 + BEYOND * f64::from(n - less) / f64::from(*less))
            }
            (None, None) => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(workers: u32, speed: f64) -> StatusNote {
        StatusNote {
            state: "running".into(),
            records_done: 100,
            records_total: Some(1000),
            records_per_second: Some(speed),
            workers,
            ..StatusNote::default()
        }
    }

    #[test]
    fn a_curve_goes_through_what_was_measured() {
        let mut measured = Measured::default();
        assert_eq!(measured.speed(&note(2, 10.0), 4), None);
        measured.note(&note(1, 5.0), 2); // Not all are there yet.
        measured.note(&note(2, 10.0), 2);
        measured.note(&note(4, 16.0), 4);
        let speed = measured.speed(&note(4, 16.0), 5).unwrap();
        assert_eq!((speed.remaining, speed.measured_to), (900.0, 4));
        let expected = [5.0, 10.0, 13.0, 16.0, 19.2];
        for (found, expected) in speed.together.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-9, "{:?}", speed.together);
        }
    }
}
