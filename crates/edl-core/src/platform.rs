// SPDX-License-Identifier: Apache-2.0
//! Messages between a master and its platform: which processes to run, and how they ended.
//!
//! On one machine the platform is the supervisor process, and these messages are JSON lines on
//! the master's standard output and input. On Kubernetes it is a task in the master's process.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::exit::Exit;
use crate::id::{PsId, WorkerId};
use crate::job::JobState;
use crate::named::named;
use crate::pod::Wait;
use crate::rng;

/// A process of the job, by its part and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct InstanceId {
    pub role: Role,
    pub id: u32,
}

impl InstanceId {
    /// A job has one master at a time.
    pub const MASTER: Self = Self { role: Role::Master, id: 0 };
}

impl From<WorkerId> for InstanceId {
    fn from(WorkerId(id): WorkerId) -> Self {
        Self { role: Role::Worker, id }
    }
}

impl From<PsId> for InstanceId {
    fn from(PsId(id): PsId) -> Self {
        Self { role: Role::Ps, id }
    }
}

named! {
    /// The name of a chaos action, which requests carry.
    ChaosKind {
        #[default]
        Kill = "kill",
        Pause = "pause",
        Resume = "resume",
        Partition = "partition",
        Slow = "slow",
    }

    Role {
        #[default]
        Master = "master",
        Ps = "ps",
        Worker = "worker",
    }

    /// The state of a process, as the job's status shows it.
    InstanceState {
        #[default]
        Starting = "starting",
        /// It cannot be started yet.
        Waiting = "waiting",
        Running = "running",
        Loading = "loading",
        Serving = "serving",
        Joining = "joining",
        Working = "working",
        Leaving = "leaving",
        Gone = "gone",
        /// The phases of a pod whose master does not respond.
        Pending = "pending",
        Succeeded = "succeeded",
        Failed = "failed",
        Unknown = "unknown",
        /// It is ready, and takes the place of a worker that is lost.
        Spare = "spare",
    }
}

/// Variables that a worker is started with, unless its user sets them. A step's memory is freed
/// and allocated again at once: without them the C library returns it to the system each time,
/// and the page faults cost up to a tenth of a step.
pub const WORKER_VARIABLES: [(&str, &str); 2] =
    [("MALLOC_MMAP_THRESHOLD_", "1073741824"), ("MALLOC_TRIM_THRESHOLD_", "1073741824")];

/// Master → platform.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    Launch {
        instance: InstanceId,
        /// Of the memory that the job asks for: more after a process ran out of it.
        memory_percent: u32,
        /// It is not needed yet, so its start must not take CPU time from others.
        is_spare: bool,
    },
    /// Asks it to exit, and kills it after the grace.
    Stop { instance: InstanceId, grace_ms: u64 },
    /// The job is over and the process knows it: it is killed if it is still there after the grace.
    Dismiss { instance: InstanceId, grace_ms: u64 },
    /// A chaos action, to test how the job recovers.
    Chaos { instance: InstanceId, action: ChaosAction },
}

/// A fault to inject into a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChaosAction {
    Kill,
    /// It stops, as if its machine did.
    Pause,
    Resume,
    /// It is disconnected from the others for a while.
    Partition {
        millis: u64,
    },
    /// It takes `factor` times as long for everything for a while.
    Slow {
        factor: u32,
        millis: u64,
    },
}

impl ChaosAction {
    /// The default duration: longer than a process may be silent by default.
    pub const DEFAULT_MILLIS: u64 = 15_000;
    pub const MAX_MILLIS: u64 = 3_600_000;
    /// The default of how much slower.
    pub const DEFAULT_FACTOR: u32 = 4;
    pub const FACTORS: std::ops::RangeInclusive<u32> = 2..=100;

    /// `millis` is how long partition and slow last, and `factor` how slow; zero is the default.
    pub fn new(kind: ChaosKind, millis: u64, factor: u32) -> Result<Self, String> {
        let is_over_by_itself = matches!(kind, ChaosKind::Partition | ChaosKind::Slow);
        if millis != 0 && !is_over_by_itself {
            return Err(format!("{kind} takes no duration; only partition and slow do"));
        }
        if millis > Self::MAX_MILLIS {
            return Err("duration must be at most 1h".to_owned());
        }
        if factor != 0 && kind != ChaosKind::Slow {
            return Err(format!("{kind} takes no factor; only slow does"));
        }
        if factor != 0 && !Self::FACTORS.contains(&factor) {
            let (least, most) = (Self::FACTORS.start(), Self::FACTORS.end());
            return Err(format!("factor must be from {least} to {most}, not {factor}"));
        }
        let millis = if millis == 0 { Self::DEFAULT_MILLIS } else { millis };
        let factor = if factor == 0 { Self::DEFAULT_FACTOR } else { factor };
        Ok(match kind {
            ChaosKind::Kill => Self::Kill,
            ChaosKind::Pause => Self::Pause,
            ChaosKind::Resume => Self::Resume,
            ChaosKind::Partition => Self::Partition { millis },
            ChaosKind::Slow => Self::Slow { factor, millis },
        })
    }
}

impl fmt::Display for ChaosAction {
    /// What happens to a process, as the end of a sentence about it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill => f.write_str("is being killed (chaos)"),
            Self::Pause => f.write_str("is being paused (chaos)"),
            Self::Resume => f.write_str("is being resumed (chaos)"),
            Self::Partition { millis } => {
                write!(f, "is disconnected from the others for {} s (chaos)", secs(*millis))
            }
            Self::Slow { factor, millis } => {
                write!(f, "runs {factor} times slower for {} s (chaos)", secs(*millis))
            }
        }
    }
}

fn secs(millis: u64) -> f64 {
    std::time::Duration::from_millis(millis).as_secs_f64()
}

/// A process that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Process {
    pub instance: InstanceId,
    pub pid: u32,
    /// How long it has run; zero if that is not known.
    pub age_ms: u64,
}

/// Platform → master.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// Everything that runs now: the first report to every new master.
    Running(Vec<Process>),
    /// A user has deleted the master, perhaps as the first of all processes.
    MasterDeleted,
    /// A user has deleted all processes, which exit within this time. For a new master, this is the
    /// first report, instead of `Running`, and there is nothing left to save.
    AllDeleted {
        within_ms: u64,
    },
    /// It is wanted, but does not run yet.
    Waiting {
        instance: InstanceId,
        why: Wait,
    },
    Started {
        instance: InstanceId,
        pid: u32,
    },
    NotStarted {
        instance: InstanceId,
        error: String,
    },
    /// It is shutting down at the request of others.
    Leaving {
        instance: InstanceId,
        pid: u32,
        how: Ended,
    },
    Ended {
        instance: InstanceId,
        pid: u32,
        how: Ended,
    },
    /// Why the platform can do nothing at all just now; `None` when it can again.
    Trouble(Option<Wait>),
    /// The operator grants the job this number of workers.
    Granted {
        workers: u32,
        /// Workers to remove first if they are too many: other jobs wait for their resources.
        leave: Vec<u32>,
    },
}

/// Hangup, interrupt, kill and terminate: a process does not send them to itself.
const SIGNALS_FROM_OUTSIDE: [i32; 4] = [1, 2, 9, 15];

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    Exit(i32),
    Signal(i32),
    /// The scheduler removed it for a pod of higher priority.
    Preempted,
    /// Its node ran short of resources, or was drained.
    Evicted,
    /// It wanted more memory than it may have.
    OutOfMemory,
    /// The kernel killed it because its machine, or the part of it that the job may use, ran out of
    /// memory. No replacement can get more.
    MachineOutOfMemory,
    /// It was deleted.
    Deleted,
    /// The node under it is gone.
    NodeLost,
}

/// The number in reports for a process whose platform knows it by text, such as a pod. The process
/// sends the same number when it connects to its master.
#[must_use]
pub fn pid_of(uid: &str) -> u32 {
    let word = rng::mix(rng::name_key(uid));
    // Zero stands for a number that is not known.
    u32::try_from(word >> 32).unwrap_or(u32::MAX).max(1)
}

impl Ended {
    /// It exited without an error.
    pub const CLEAN: Self = Self::Exit(Exit::Ok as i32);

    /// Its exit code, if it exited with one of ours.
    #[must_use]
    pub fn exit(self) -> Option<Exit> {
        match self {
            Self::Exit(code) => Exit::from_code(code),
            Self::Signal(_)
            | Self::Preempted
            | Self::Evicted
            | Self::OutOfMemory
            | Self::MachineOutOfMemory
            | Self::Deleted
            | Self::NodeLost => None,
        }
    }

    /// Whether it was ended from outside, so it is not to blame.
    #[must_use]
    pub fn is_from_outside(self) -> bool {
        match self {
            Self::Signal(signal) => SIGNALS_FROM_OUTSIDE.contains(&signal),
            Self::Preempted | Self::Evicted | Self::Deleted | Self::NodeLost => true,
            Self::Exit(_) | Self::OutOfMemory | Self::MachineOutOfMemory => false,
        }
    }

    /// How the job of a master that ended like this ended; none if another master continues it.
    #[must_use]
    pub fn job_end(self) -> Option<JobState> {
        self.exit().and_then(Exit::job_end)
    }
}

impl From<Exit> for Ended {
    fn from(exit: Exit) -> Self {
        Self::Exit(exit.code().into())
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::CLEAN => f.write_str("exited"),
            Self::Exit(code) => write!(f, "exited with code {code}"),
            Self::Signal(9) => f.write_str("was killed (SIGKILL)"),
            Self::Signal(15) => f.write_str("was terminated (SIGTERM)"),
            Self::Signal(signal) => write!(f, "was killed by signal {signal}"),
            Self::Preempted => f.write_str("was preempted by a pod of higher priority"),
            Self::Evicted => f.write_str("was evicted from its node"),
            Self::OutOfMemory => f.write_str("ran out of memory"),
            Self::MachineOutOfMemory => {
                f.write_str("was killed because the machine ran out of memory")
            }
            Self::Deleted => f.write_str("was deleted"),
            Self::NodeLost => f.write_str("was lost with its node"),
        }
    }
}

impl std::str::FromStr for InstanceId {
    type Err = ();

    /// By its name, as `Display` writes it.
    fn from_str(name: &str) -> Result<Self, ()> {
        if name == Self::MASTER.to_string() {
            return Ok(Self::MASTER);
        }
        let (role, id) = name.split_once('-').ok_or(())?;
        let role = role.parse::<Role>().ok().filter(|role| *role != Role::Master).ok_or(())?;
        Ok(Self { role, id: id.parse().map_err(drop)? })
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            Role::Master => f.write_str("master"),
            Role::Ps | Role::Worker => write!(f, "{}-{}", self.role, self.id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chaos_action_has_defaults_or_is_refused_with_a_reason() {
        use ChaosKind::{Kill, Partition, Slow};
        assert_eq!(ChaosAction::new(Kill, 0, 0), Ok(ChaosAction::Kill));
        assert_eq!(
            ChaosAction::new(Partition, 0, 0),
            Ok(ChaosAction::Partition { millis: 15_000 })
        );
        assert_eq!(
            ChaosAction::new(Slow, 1500, 0),
            Ok(ChaosAction::Slow { factor: 4, millis: 1500 })
        );
        assert_eq!(
            ChaosAction::new(Slow, 0, 9),
            Ok(ChaosAction::Slow { factor: 9, millis: 15_000 })
        );
        let refused = [
            (Kill, 1, 0, "kill takes no duration"),
            (Partition, 0, 2, "partition takes no factor"),
            (Partition, 3_600_001, 0, "at most 1h"),
            (Slow, 0, 1, "from 2 to 100"),
        ];
        for (kind, millis, factor, why) in refused {
            let error = ChaosAction::new(kind, millis, factor).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let text = ChaosAction::Slow { factor: 3, millis: 1500 }.to_string();
        assert_eq!(text, "runs 3 times slower for 1.5 s (chaos)");
    }
}
