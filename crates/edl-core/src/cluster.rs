// SPDX-License-Identifier: Apache-2.0
//! A job's pods: their images, resources, volumes, variables and priorities.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::platform::{InstanceId, Role};
use crate::spec::{Invalid, JobSpec};

mod priority;
mod resources;
mod volumes;

pub use priority::{PriorityClass, WorkerPriority, is_high, n_high};
pub use resources::{Resources, UNITS, times};
pub use volumes::{Source, Volume, Volumes};

/// Longer ones do not fit into a label.
const MAX_NAME: usize = 63;

/// The Secrets of `--image_pull_secrets`, separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secrets(pub Vec<String>);

impl FromStr for Secrets {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let checked = names.map(|name| check_name("a Secret", name).map(|()| name.to_owned()));
        checked.collect::<Result<_, _>>().map(Self)
    }
}

/// The variables of `--envs`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables(pub BTreeMap<String, String>);

impl FromStr for Variables {
    type Err = String;

    /// `a=1,b=x,y`: a piece without `=` belongs to the value before it.
    fn from_str(text: &str) -> Result<Self, String> {
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
                    return Err(format!("`{piece}` is not in the form NAME=value"));
                }
            }
        }
        Ok(Self(pairs))
    }
}

fn is_variable(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty() && name.chars().all(fits) && !name.starts_with(|c: char| c.is_ascii_digit())
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
        let images: &[&str] = match role {
            Role::Master => &[],
            Role::Worker => &[&self.worker_image],
            Role::Ps => &[&self.ps_image, &self.worker_image],
        };
        images.iter().copied().find(|image| !image.is_empty()).unwrap_or(&self.image_name)
    }

    /// The resources that a process requests, and its limits.
    #[must_use]
    pub fn resources(&self, role: Role) -> (&Resources, &Resources) {
        let (request, limit) = match role {
            Role::Master => (&self.master_resource_request, &self.master_resource_limit),
            Role::Ps => (&self.ps_resource_request, &self.ps_resource_limit),
            Role::Worker => (&self.worker_resource_request, &self.worker_resource_limit),
        };
        (request, if limit.0.is_empty() { request } else { limit })
    }

    /// How many workers get the high class, by their share.
    #[must_use]
    pub fn n_high_workers(&self) -> usize {
        match *self.worker_pod_priority {
            WorkerPriority::Share(share) => n_high(share, self.num_workers) as usize,
            WorkerPriority::Unset | WorkerPriority::Class(_) => 0,
        }
    }

    /// The PriorityClass of a process. `is_high`: a worker is one of the share that
    /// gets the high class; unset, its number decides.
    #[must_use]
    pub fn priority_class(&self, instance: InstanceId, is_high: Option<bool>) -> Option<&str> {
        let master = self.master_pod_priority.name();
        match (instance.role, &*self.worker_pod_priority) {
            (Role::Master, _) => master,
            (Role::Ps, _) => self.ps_pod_priority.name().or(master),
            (Role::Worker, WorkerPriority::Unset) => None,
            (Role::Worker, WorkerPriority::Class(name)) => Some(name),
            (Role::Worker, WorkerPriority::Share(share)) => {
                let by_number = || self::is_high(*share, instance.id, self.num_workers);
                if is_high.unwrap_or_else(by_number) {
                    self.high_priority_class.name()
                } else {
                    self.low_priority_class.name()
                }
            }
        }
    }

    /// The job's folder as its pods see it.
    pub fn cluster_job_dir(&self) -> Result<String, Invalid> {
        let first = self.volume.0.first().ok_or_else(|| {
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
        self.cluster_job_dir()?;
        if !self.job_dir.is_empty() && !self.job_dir.starts_with('/') {
            return Err(Invalid(format!(
                "--job_dir=`{}` must be an absolute path inside the job's pods",
                self.job_dir
            )));
        }
        if !self.namespace.is_empty() {
            let checked = check_name("a namespace", &self.namespace);
            checked.map_err(|why| Invalid(format!("--namespace: {why}")))?;
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

/// Refuses what cannot be the name of a Kubernetes object.
fn check_name(what: &str, name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_name = name.chars().all(fits)
        && ends(name.chars().next())
        && ends(name.chars().last())
        && name.len() <= MAX_NAME;
    if is_name {
        return Ok(());
    }
    Err(format!(
        "`{name}` is not a valid name for {what}; use at most {MAX_NAME} characters of a-z, 0-9, \
         `-` and `.`"
    ))
}

#[cfg(test)]
mod tests;
