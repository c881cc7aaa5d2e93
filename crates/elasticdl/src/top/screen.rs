// SPDX-License-Identifier: Apache-2.0
//! The state of the full-screen view and the meaning of its keys, without terminal and clock.

use edl_core::platform::Role;
use edl_core::series::Series;
use edl_net::proto::{Instance, JobStatus};

/// More points than a wide terminal has columns; older ones are thinned out.
const MOST_POINTS: usize = 600;

/// One job as it is watched.
#[derive(Debug)]
pub(crate) struct Screen {
    pub(super) status: JobStatus,
    pub(super) loss: Curve,
    pub(super) rate: Curve,
    /// Name of the selected process; its line number changes when processes come and go.
    chosen: Option<String>,
    /// The result of the last key.
    pub(super) message: String,
    /// Workers that were requested and not yet confirmed.
    requested: Option<u32>,
    /// The process that a second `k` kills.
    to_kill: Option<String>,
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
    Quit,
}

/// What a key requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Scale(u32),
    Kill { name: String, pid: u32 },
    Quit,
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
            message: String::new(),
            requested: None,
            to_kill: None,
        }
    }
}

impl Screen {
    /// Takes a new status.
    pub(crate) fn take(&mut self, status: JobStatus) {
        let at = status.elapsed_secs;
        let is_new = at > self.status.elapsed_secs;
        if is_new && status.step > 0 {
            let loss = status.known_loss().filter(|loss| loss.is_finite());
            if let Some(loss) = loss.filter(|_| status.step != self.status.step) {
                self.loss.push((at, f64::from(loss)));
            }
            self.rate.push((at, status.records_per_second));
        }
        if self.requested.is_some_and(|requested| requested == status.workers_wanted) {
            self.requested = None;
        }
        self.status = status;
        let is_there = |name: &String| self.processes().any(|process| process.name() == *name);
        if !self.chosen.as_ref().is_some_and(is_there) {
            let first =
                self.processes().find(|process| process.role() == Role::Worker).map(Instance::name);
            self.chosen = first;
        }
    }

    pub(crate) fn key(&mut self, key: Key) -> Option<Action> {
        let to_kill = self.to_kill.take();
        match key {
            Key::Quit => Some(Action::Quit),
            Key::More => self.scale(1),
            Key::Fewer => self.scale(-1),
            Key::Up => self.choose(-1),
            Key::Down => self.choose(1),
            Key::Kill => self.kill(to_kill.as_deref()),
        }
    }

    /// Asks before it kills; `asked` is the process that was asked about.
    fn kill(&mut self, asked: Option<&str>) -> Option<Action> {
        if !self.status.allow_chaos {
            self.message = "to kill processes here, start the job with --allow_chaos".into();
            return None;
        }
        let is_chosen = |it: &&Instance| it.pid > 0 && self.is_chosen(it);
        let Some((name, pid)) = self.processes().find(is_chosen).map(|it| (it.name(), it.pid))
        else {
            self.message = "no running process selected".into();
            return None;
        };
        if asked == Some(name.as_str()) {
            return Some(Action::Kill { name, pid });
        }
        self.message = format!("press k again to kill {name}");
        self.to_kill = Some(name);
        None
    }

    /// Keys may come faster than answers.
    fn scale(&mut self, by: i32) -> Option<Action> {
        let now = self.requested.unwrap_or(self.status.workers_wanted);
        let wanted = now.checked_add_signed(by).filter(|wanted| *wanted > 0)?;
        self.requested = Some(wanted);
        Some(Action::Scale(wanted))
    }

    fn choose(&mut self, by: isize) -> Option<Action> {
        let names: Vec<String> = self.processes().map(Instance::name).collect();
        let at = names.iter().position(|name| Some(name) == self.chosen.as_ref()).unwrap_or(0);
        let next = at.saturating_add_signed(by).min(names.len().saturating_sub(1));
        self.chosen = names.get(next).cloned();
        None
    }

    /// Shows the result of the last key.
    pub(crate) fn show_message(&mut self, text: impl Into<String>) {
        self.message = text.into();
    }

    /// The master refused, or cannot be reached.
    pub(crate) fn failed(&mut self, text: impl Into<String>) {
        self.requested = None;
        self.message = text.into();
    }

    pub(crate) fn is_chosen(&self, process: &Instance) -> bool {
        self.chosen.as_deref() == Some(process.name().as_str())
    }

    /// The processes that can be killed: workers and servers, but not the master, which this view
    /// depends on.
    pub(crate) fn processes(&self) -> impl Iterator<Item = &Instance> {
        self.status.instances.iter().filter(|process| process.role() != Role::Master)
    }
}

/// The smallest and the largest of both axes; none without two points.
pub(crate) fn bounds(points: &[(f64, f64)]) -> Option<([f64; 2], [f64; 2])> {
    let (first, last) = (points.first()?, points.last()?);
    let values = points.iter().map(|(_, value)| *value);
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    let margin = ((high - low) * 0.05).max(1e-9);
    (last.0 > first.0).then_some(([first.0, last.0], [(low - margin).max(0.0), high + margin]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(id: u32) -> Instance {
        Instance { role: Role::Worker.into(), id, pid: 100 + id, ..Instance::default() }
    }

    fn status(elapsed_secs: f64, workers: &[u32]) -> JobStatus {
        let master = Instance { role: Role::Master.into(), pid: 1, ..Instance::default() };
        let instances = std::iter::once(master).chain(workers.iter().copied().map(worker));
        JobStatus {
            elapsed_secs,
            step: 1 + elapsed_secs.to_bits() % 1000,
            loss: 0.5,
            workers_wanted: 2,
            allow_chaos: true,
            instances: instances.collect(),
            ..JobStatus::default()
        }
    }

    #[test]
    fn keys_scale_from_the_last_request_and_never_to_zero() {
        let mut screen = Screen::default();
        screen.take(status(1.0, &[0, 1]));
        assert_eq!(screen.key(Key::More), Some(Action::Scale(3)));
        assert_eq!(screen.key(Key::More), Some(Action::Scale(4)));
        screen.failed("no more than 3 lanes");
        assert_eq!(screen.key(Key::Fewer), Some(Action::Scale(1)));
        assert_eq!(screen.key(Key::Fewer), None, "one worker must stay");
        assert_eq!(screen.message, "no more than 3 lanes");
    }

    #[test]
    fn the_chosen_process_is_kept_by_name_and_the_next_is_taken_when_it_is_gone() {
        let mut screen = Screen::default();
        assert_eq!(screen.key(Key::Kill), None);
        screen.take(status(1.0, &[0, 1]));
        assert_eq!(screen.key(Key::Down), None);
        screen.take(status(2.0, &[0, 1, 2]));
        assert_eq!(killed(&mut screen), "worker-1");
        screen.take(status(3.0, &[0, 2]));
        assert_eq!(killed(&mut screen), "worker-0");
        for _ in 0..9 {
            screen.key(Key::Down);
        }
        assert_eq!(killed(&mut screen), "worker-2");
    }

    /// Presses `k` twice.
    fn killed(screen: &mut Screen) -> String {
        assert_eq!(screen.key(Key::Kill), None);
        let Some(Action::Kill { name, .. }) = screen.key(Key::Kill) else {
            panic!("{}", screen.message)
        };
        name
    }

    #[test]
    fn a_process_is_killed_only_on_the_second_key_and_only_where_chaos_is_allowed() {
        let mut screen = Screen::default();
        screen.take(status(1.0, &[0, 1]));
        assert_eq!(screen.key(Key::Kill), None);
        assert_eq!(screen.message, "press k again to kill worker-0");
        assert_eq!(screen.key(Key::Down), None);
        assert_eq!(screen.key(Key::Kill), None, "another process");
        assert_eq!(screen.message, "press k again to kill worker-1");
        let kill = Action::Kill { name: "worker-1".into(), pid: 101 };
        assert_eq!(screen.key(Key::Kill), Some(kill));
        screen.take(JobStatus { allow_chaos: false, ..status(2.0, &[0, 1]) });
        assert_eq!((screen.key(Key::Kill), screen.key(Key::Kill)), (None, None));
        assert!(screen.message.contains("--allow_chaos"), "{}", screen.message);
    }

    #[test]
    fn a_series_of_a_long_job_stays_short_and_keeps_its_beginning() {
        let mut screen = Screen::default();
        for second in 0..100_000 {
            screen.rate.push((f64::from(second), f64::from(second % 7)));
        }
        let points: Vec<(f64, f64)> = screen.rate.iter().copied().collect();
        assert!(points.len() <= MOST_POINTS);
        let ([from, to], [low, high]) = bounds(&points).expect("there are points");
        assert!(from < 1.0 && to > 99_000.0, "{from} to {to}");
        assert!(low <= 0.0 && high >= 6.0);
    }
}
