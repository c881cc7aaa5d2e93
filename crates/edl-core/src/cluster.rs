// SPDX-License-Identifier: Apache-2.0
//! The words of a job that speak of Kubernetes, read: resources, volumes, variables, priorities.
//!
//! Every refusal is one sentence that names the flag.

use std::collections::BTreeMap;

use crate::platform::{InstanceId, Role};
use crate::spec::{Invalid, JobSpec};

mod resources;
mod volumes;

pub use resources::{Resources, resources, times};
pub use volumes::{Source, Volume, volumes};

/// Longer ones do not fit into a label.
const MAX_NAME: usize = 63;

/// Who may push whom aside: a PriorityClass, or a share of the workers that gets the high one.
#[derive(Clone, Debug, PartialEq)]
pub enum Priority {
    Unset,
    Class(String),
    Fraction(f64),
}

/// Reads a name or a number between 0 and 1.
pub fn priority(flag: &str, text: &str) -> Result<Priority, Invalid> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(Priority::Unset);
    }
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(Priority::Fraction(share)),
        Ok(_) => Err(Invalid(format!(
            "--{flag}=`{text}` is not a fraction of the workers; use a number from 0 to 1, or the \
             name of a PriorityClass"
        ))),
        Err(_) => {
            check_name(flag, "a PriorityClass", text)?;
            Ok(Priority::Class(text.to_owned()))
        }
    }
}

/// How many of `workers` get the high class.
#[must_use]
pub fn n_high(share: f64, workers: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "a share of a u32 fits one")]
    #[expect(clippy::cast_sign_loss, reason = "a share is not negative")]
    let high = (f64::from(workers) * share).ceil() as u32;
    high.min(workers)
}

/// Whether the worker of this number is one of the high ones when nobody counts those that run:
/// they are taken from both ends of the numbers in turn.
#[must_use]
pub fn is_high(share: f64, worker: u32, workers: u32) -> bool {
    let workers = workers.max(1);
    let slot = worker % workers;
    let from_end = workers - 1 - slot;
    let rank = if slot <= from_end { 2 * slot } else { 2 * from_end + 1 };
    rank < n_high(share, workers)
}

impl JobSpec {
    /// Whether the job runs on a cluster.
    #[must_use]
    pub fn is_on_cluster(&self) -> bool {
        !self.image_name.is_empty()
    }

    /// The image of a process.
    #[must_use]
    pub fn image(&self, role: Role) -> &str {
        let words: &[&str] = match role {
            Role::Master => &[],
            Role::Worker => &[&self.worker_image],
            Role::Ps => &[&self.ps_image, &self.worker_image],
        };
        words.iter().copied().find(|word| !word.is_empty()).unwrap_or(&self.image_name)
    }

    /// What a process asks for, and what it must not exceed.
    pub fn resources(&self, role: Role) -> Result<(Resources, Resources), Invalid> {
        let (request, limit) = match role {
            Role::Master => (&self.master_resource_request, &self.master_resource_limit),
            Role::Ps => (&self.ps_resource_request, &self.ps_resource_limit),
            Role::Worker => (&self.worker_resource_request, &self.worker_resource_limit),
        };
        let request = resources(&format!("{role}_resource_request"), request)?;
        let limit = match limit.trim() {
            "" => request.clone(),
            limit => resources(&format!("{role}_resource_limit"), limit)?,
        };
        Ok((request, limit))
    }

    /// How many workers get the high class, by their share.
    #[must_use]
    pub fn n_high_workers(&self) -> usize {
        match priority("worker_pod_priority", &self.worker_pod_priority) {
            Ok(Priority::Fraction(share)) => n_high(share, self.num_workers) as usize,
            Ok(Priority::Unset | Priority::Class(_)) | Err(_) => 0,
        }
    }

    /// The PriorityClass of a process. `is_high` says whether a worker is one of the share that
    /// gets the high class; unset, its number decides.
    pub fn priority_class(
        &self,
        instance: InstanceId,
        is_high: Option<bool>,
    ) -> Result<Option<&str>, Invalid> {
        let master = &self.master_pod_priority;
        let (flag, text) = match instance.role {
            Role::Master => ("master_pod_priority", master),
            Role::Ps if self.ps_pod_priority.is_empty() => ("master_pod_priority", master),
            Role::Ps => ("ps_pod_priority", &self.ps_pod_priority),
            Role::Worker => ("worker_pod_priority", &self.worker_pod_priority),
        };
        match (priority(flag, text)?, instance.role) {
            (Priority::Unset, _) => Ok(None),
            (Priority::Class(_), _) => Ok(Some(text.trim())),
            (Priority::Fraction(share), Role::Worker) => {
                let by_number = || self::is_high(share, instance.id, self.num_workers);
                Ok(Some(if is_high.unwrap_or_else(by_number) {
                    &self.high_priority_class
                } else {
                    &self.low_priority_class
                }))
            }
            (Priority::Fraction(_), Role::Master | Role::Ps) => Err(Invalid(format!(
                "--{flag}=`{text}` is a fraction, which only --worker_pod_priority accepts; use \
                 the name of a PriorityClass"
            ))),
        }
    }

    /// The variables of `--envs`.
    pub fn envs(&self) -> Result<BTreeMap<String, String>, Invalid> {
        pairs("envs", &self.envs)
    }

    /// The volumes of every pod.
    pub fn volumes(&self) -> Result<Vec<Volume>, Invalid> {
        volumes(&self.volume)
    }

    /// The names of `--image_pull_secrets`.
    pub fn pull_secrets(&self) -> Result<Vec<&str>, Invalid> {
        let names = self.image_pull_secrets.split(',').map(str::trim);
        let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
        for name in &names {
            check_name("image_pull_secrets", "a Secret", name)?;
        }
        Ok(names)
    }

    /// The job's folder as its pods see it.
    pub fn cluster_job_dir(&self) -> Result<String, Invalid> {
        let volumes = self.volumes()?;
        let first = volumes.first().ok_or_else(|| {
            Invalid(
                "the job's pods share no storage, so a replaced pod could not resume training; add \
                 a shared volume with --volume, e.g. \"claim_name=CLAIM,mount_path=/data\""
                    .into(),
            )
        })?;
        if !self.job_dir.is_empty() {
            return Ok(self.job_dir.clone());
        }
        let mount = first.mount_path.trim_end_matches('/');
        Ok(format!("{mount}/elasticdl/{}", self.job_name))
    }

    /// Refuses what cannot become pods.
    pub fn check_cluster(&self) -> Result<(), Invalid> {
        for role in [Role::Master, Role::Ps, Role::Worker] {
            self.resources(role)?;
            self.priority_class(InstanceId { role, id: 0 }, None)?;
        }
        self.envs()?;
        self.pull_secrets()?;
        self.cluster_job_dir()?;
        if !self.job_dir.is_empty() && !self.job_dir.starts_with('/') {
            return Err(Invalid(format!(
                "--job_dir=`{}` must be an absolute path inside the job's pods",
                self.job_dir
            )));
        }
        if !self.namespace.is_empty() {
            check_name("namespace", "a namespace", &self.namespace)?;
        }
        let starts_badly = |c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit();
        if self.job_name.starts_with(starts_badly) || self.job_name.ends_with(starts_badly) {
            return Err(Invalid(format!(
                "job name `{}` must begin and end with a letter or a digit; choose another with --job_name",
                self.job_name
            )));
        }
        Ok(())
    }
}

/// `a=1,b=x,y`: a piece without `=` belongs to the value before it.
fn pairs(flag: &str, text: &str) -> Result<BTreeMap<String, String>, Invalid> {
    let mut pairs: BTreeMap<String, String> = BTreeMap::new();
    let mut last: Option<String> = None;
    for piece in text.split(',').filter(|_| !text.trim().is_empty()) {
        match (piece.split_once('='), &last) {
            (Some((name, value)), _) if is_variable(name.trim()) => {
                pairs.insert(name.trim().to_owned(), value.to_owned());
                last = Some(name.trim().to_owned());
            }
            (Some(_) | None, Some(name)) => {
                let value = pairs.entry(name.clone()).or_default();
                value.push(',');
                value.push_str(piece);
            }
            (Some(_) | None, None) => {
                return Err(Invalid(format!("--{flag}: `{piece}` is not in the form NAME=value")));
            }
        }
    }
    Ok(pairs)
}

fn is_variable(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty() && name.chars().all(fits) && !name.starts_with(|c: char| c.is_ascii_digit())
}

/// Names of Kubernetes objects have one form.
fn check_name(flag: &str, what: &str, name: &str) -> Result<(), Invalid> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_name = name.chars().all(fits)
        && ends(name.chars().next())
        && ends(name.chars().last())
        && name.len() <= MAX_NAME;
    if is_name {
        return Ok(());
    }
    Err(Invalid(format!(
        "--{flag}: `{name}` is not a valid name for {what}; use at most {MAX_NAME} characters of \
         a-z, 0-9, `-` and `.`"
    )))
}

#[cfg(test)]
mod tests;
