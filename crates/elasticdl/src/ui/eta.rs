// SPDX-License-Identifier: Apache-2.0
//! A steady estimate of the time left. The master's own follows the present speed, which a kill, an
//! evaluation or a busy machine changes for a moment.

/// An estimate from this long ago has about a third of its weight.
const MEMORY_SECS: f64 = 15.0;

/// Averages when the job ends, by the job's own clock.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Eta {
    /// The time of the last estimate, and when the job ends.
    last: Option<(f64, f64)>,
}

impl Eta {
    /// The seconds left, from those that the master estimates after `elapsed` seconds; negative if
    /// they are not known.
    pub(super) fn smooth(&mut self, elapsed: f64, left: f64) -> f64 {
        if left < 0.0 {
            // Not known yet, or there is no end.
            return left;
        }
        let end = elapsed + left;
        let end = match self.last {
            // The clock of another run, or of a new master.
            Some((before, _)) if elapsed < before => end,
            Some((before, smooth)) => {
                smooth + (end - smooth) * (1.0 - ((before - elapsed) / MEMORY_SECS).exp())
            }
            None => end,
        };
        self.last = Some((elapsed, end));
        (end - elapsed).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_job_counts_down() {
        let mut eta = Eta::default();
        for elapsed in 0..100 {
            let left = 100.0 - f64::from(elapsed);
            assert!((eta.smooth(elapsed.into(), left) - left).abs() < 1e-9);
        }
    }

    #[test]
    fn a_moment_of_another_speed_hardly_changes_the_estimate_and_a_lasting_one_does() {
        let mut eta = Eta::default();
        assert!((eta.smooth(10.0, 60.0) - 60.0).abs() < 1e-9);
        let jump = eta.smooth(10.5, 600.0);
        assert!(jump < 80.0, "{jump}");
        let lasting = (1..200).fold(0.0, |_, at| eta.smooth(10.5 + f64::from(at), 600.0));
        assert!(lasting > 570.0, "{lasting}");
    }

    #[test]
    fn an_unknown_time_stays_unknown_and_another_run_starts_again() {
        let mut eta = Eta::default();
        assert!((eta.smooth(5.0, -1.0) + 1.0).abs() < 1e-9);
        eta.smooth(50.0, 10.0);
        assert!((eta.smooth(1.0, 500.0) - 500.0).abs() < 1e-9, "the clock went back");
        assert!(eta.smooth(900.0, 0.0) >= 0.0);
    }
}
