// SPDX-License-Identifier: Apache-2.0
//! What the terminal view knows and what its keys mean: no terminal, no clock.

use edl_core::series::Series;
use edl_net::proto::{Instance, JobStatus};

/// More points than a wide terminal has columns; older ones are thinned out.
const MOST_POINTS: usize = 600;

/// One job as it is watched.
#[derive(Debug)]
pub(crate) struct Screen {
    status: JobStatus,
    loss: Curve,
    rate: Curve,
    /// The chosen process, by its name: numbers of lines change when processes come and go.
    chosen: Option<String>,
    /// What the last key led to.
    told: String,
    /// Workers that were asked for and not yet confirmed.
    asked: Option<u32>,
}

/// Values over time.
pub(crate) type Curve = Series<(f64, f64)>;

/// A key that means something here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    More,
    Fewer,
    Kill,
    Up,
    Down,
    Leave,
}

/// What a key asks of others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Scale(u32),
    Kill { name: String, pid: u32 },
    Leave,
}

impl Default for Screen {
    fn default() -> Self {
        // A series keeps its last point beyond its limit.
        let curve = || Series::new(MOST_POINTS - 1);
        Self {
            status: JobStatus::default(),
            loss: curve(),
            rate: curve(),
            chosen: None,
            told: String::new(),
            asked: None,
        }
    }
}

impl Screen {
    /// Takes what the master says now.
    pub(crate) fn take(&mut self, status: JobStatus) {
        let at = status.elapsed_secs;
        let is_new = at > self.status.elapsed_secs;
        if is_new && status.step > 0 {
            if status.loss.is_finite() && status.step != self.status.step {
                self.loss.push((at, f64::from(status.loss)));
            }
            self.rate.push((at, status.records_per_second));
        }
        if self.asked.is_some_and(|asked| asked == status.workers_wanted) {
            self.asked = None;
        }
        self.status = status;
        let is_there = |name: &String| self.processes().any(|process| process.name() == *name);
        if !self.chosen.as_ref().is_some_and(is_there) {
            let first =
                self.processes().find(|process| process.role == "worker").map(Instance::name);
            self.chosen = first;
        }
    }

    pub(crate) fn key(&mut self, key: Key) -> Option<Ask> {
        match key {
            Key::Leave => Some(Ask::Leave),
            Key::More => self.scale(1),
            Key::Fewer => self.scale(-1),
            Key::Up => self.choose(-1),
            Key::Down => self.choose(1),
            Key::Kill => {
                let chosen = self.processes().find(|process| Some(process.name()) == self.chosen);
                let ask = chosen
                    .filter(|process| process.pid > 0)
                    .map(|process| Ask::Kill { name: process.name(), pid: process.pid });
                if ask.is_none() {
                    self.told = "no running process selected".into();
                }
                ask
            }
        }
    }

    /// Keys may come faster than answers.
    fn scale(&mut self, by: i32) -> Option<Ask> {
        let now = self.asked.unwrap_or(self.status.workers_wanted);
        let wanted = now.checked_add_signed(by).filter(|wanted| *wanted > 0)?;
        self.asked = Some(wanted);
        Some(Ask::Scale(wanted))
    }

    fn choose(&mut self, by: isize) -> Option<Ask> {
        let names: Vec<String> = self.processes().map(Instance::name).collect();
        let at = names.iter().position(|name| Some(name) == self.chosen.as_ref()).unwrap_or(0);
        let next = at.saturating_add_signed(by).min(names.len().saturating_sub(1));
        self.chosen = names.get(next).cloned();
        None
    }

    /// What came of the last key.
    pub(crate) fn tell(&mut self, text: impl Into<String>) {
        self.told = text.into();
    }

    /// The master refused, or cannot be reached.
    pub(crate) fn failed(&mut self, text: impl Into<String>) {
        self.asked = None;
        self.told = text.into();
    }

    pub(crate) fn status(&self) -> &JobStatus {
        &self.status
    }

    pub(crate) fn loss(&self) -> &Curve {
        &self.loss
    }

    pub(crate) fn rate(&self) -> &Curve {
        &self.rate
    }

    pub(crate) fn told(&self) -> &str {
        &self.told
    }

    pub(crate) fn is_chosen(&self, process: &Instance) -> bool {
        self.chosen.as_deref() == Some(process.name().as_str())
    }

    /// Everything that can be killed: workers and servers. The master is not among them: who looks
    /// here looks through it.
    pub(crate) fn processes(&self) -> impl Iterator<Item = &Instance> {
        self.status.instances.iter().filter(|process| process.role != "master")
    }
}

/// The smallest and the largest of both axes; none without two points.
pub(crate) fn bounds(points: &[(f64, f64)]) -> Option<([f64; 2], [f64; 2])> {
    let (first, last) = (points.first()?, points.last()?);
    let values = points.iter().map(|(_, value)| *value);
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    let room = ((high - low) * 0.05).max(1e-9);
    (last.0 > first.0).then_some(([first.0, last.0], [(low - room).max(0.0), high + room]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(id: u32) -> Instance {
        Instance { role: "worker".into(), id, pid: 100 + id, ..Instance::default() }
    }

    fn status(elapsed_secs: f64, workers: &[u32]) -> JobStatus {
        let master = Instance { role: "master".into(), pid: 1, ..Instance::default() };
        let instances = std::iter::once(master).chain(workers.iter().copied().map(worker));
        JobStatus {
            elapsed_secs,
            step: 1 + elapsed_secs.to_bits() % 1000,
            loss: 0.5,
            workers_wanted: 2,
            instances: instances.collect(),
            ..JobStatus::default()
        }
    }

    #[test]
    fn keys_scale_from_what_was_asked_last_and_never_to_nobody() {
        let mut screen = Screen::default();
        screen.take(status(1.0, &[0, 1]));
        assert_eq!(screen.key(Key::More), Some(Ask::Scale(3)));
        assert_eq!(screen.key(Key::More), Some(Ask::Scale(4)));
        screen.failed("no more than 3 lanes");
        assert_eq!(screen.key(Key::Fewer), Some(Ask::Scale(1)));
        assert_eq!(screen.key(Key::Fewer), None, "somebody must work");
        assert_eq!(screen.told(), "no more than 3 lanes");
    }

    #[test]
    fn the_chosen_process_is_kept_by_name_and_the_next_is_taken_when_it_is_gone() {
        let mut screen = Screen::default();
        assert_eq!(screen.key(Key::Kill), None);
        screen.take(status(1.0, &[0, 1]));
        assert_eq!(screen.key(Key::Down), None);
        screen.take(status(2.0, &[0, 1, 2]));
        assert_eq!(screen.key(Key::Kill), Some(Ask::Kill { name: "worker-1".into(), pid: 101 }));
        screen.take(status(3.0, &[0, 2]));
        assert_eq!(screen.key(Key::Kill), Some(Ask::Kill { name: "worker-0".into(), pid: 100 }));
        for _ in 0..9 {
            screen.key(Key::Down);
        }
        assert_eq!(screen.key(Key::Kill), Some(Ask::Kill { name: "worker-2".into(), pid: 102 }));
    }

    #[test]
    fn a_series_of_a_long_job_stays_short_and_keeps_its_beginning() {
        let mut screen = Screen::default();
        for second in 0..100_000 {
            screen.rate.push((f64::from(second), f64::from(second % 7)));
        }
        let points: Vec<(f64, f64)> = screen.rate().iter().copied().collect();
        assert!(points.len() <= MOST_POINTS);
        let ([from, to], [low, high]) = bounds(&points).expect("there are points");
        assert!(from < 1.0 && to > 99_000.0, "{from} to {to}");
        assert!(low <= 0.0 && high >= 6.0);
    }
}
