// SPDX-License-Identifier: Apache-2.0
//! The job description: the same fields for flags, YAML files and TrainingJobs.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::batch::{self, BatchPlan};
use crate::layout::Layout;
use crate::text::nearest;

mod choices;
mod field;
mod fields;
mod hosts;
mod template;

pub use choices::{
    AllreduceDtype, Codec, ImagePullPolicy, JobType, LogLevel, OnNonfinite, RestartPolicy,
    SameBits, Strategy, Track,
};
pub use field::{Field, FieldKind, FieldType, Fixed, Flag, Group, Parsed, Seconds};
pub use fields::{FIELDS, JobSpec};
pub use hosts::HttpHosts;
pub use template::template;

/// Every checkpoint has one file per partition.
const MAX_PARTITIONS: u32 = 4096;
/// More than a cluster of thousands of nodes gives one job, and few enough to plan in no time.
pub const MAX_WORKERS: u32 = 10_000;
/// The most workers that train together under AllReduce. Each of them has a connection to every
/// other one and, while they connect, a thread for it.
pub const MAX_MEMBERS: u32 = 1024;

/// How gradients of several workers are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Async,
    /// Asynchronous with bounded staleness.
    Bounded {
        versions: u32,
    },
    /// Rounds of this many batches, applied together.
    Sync {
        grads_to_wait: u32,
    },
    /// The parts of a batch, one per lane, are applied together.
    Steps {
        lanes: u32,
    },
}

impl Mode {
    #[must_use]
    pub fn is_sync(self) -> bool {
        matches!(self, Self::Sync { .. })
    }
}

/// An error in a job description: a sentence that names the flag and what to do next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

/// The field with this name.
pub fn field(name: &str) -> Result<&'static Field, Invalid> {
    FIELDS.iter().find(|field| field.name == name).ok_or_else(|| {
        let alias = FIELDS.iter().find(|field| field.aliases.contains(&name));
        let near = || nearest(name, FIELDS.iter().map(|field| field.name));
        Invalid(match alias.map(|field| field.name).or_else(near) {
            Some(near) => format!("unknown field `{name}`; did you mean `{near}`?"),
            None => format!("unknown field `{name}`; `elasticdl init` lists all fields"),
        })
    })
}

/// Checks the names and types of fields and returns their values in standard form, without those
/// that are not set.
pub fn read(given: Map<String, Value>) -> Result<Map<String, Value>, Invalid> {
    let mut checked = Map::new();
    for (name, value) in given {
        let field = field(&name)?;
        if field.is_optional || !value.is_null() {
            let value = (field.read)(value).map_err(|why| Invalid(format!("--{name}: {why}")))?;
            checked.insert(name, value);
        }
    }
    Ok(checked)
}

impl TryFrom<Map<String, Value>> for JobSpec {
    type Error = Invalid;

    fn try_from(given: Map<String, Value>) -> Result<Self, Invalid> {
        Self::default().with(given)
    }
}

/// The fields of a job that was started before, as its folder, its ConfigMap or its master has them.
#[derive(Deserialize)]
struct Stored(Map<String, Value>);

impl TryFrom<Stored> for JobSpec {
    type Error = Invalid;

    fn try_from(Stored(mut given): Stored) -> Result<Self, Invalid> {
        // A job from before there were versions.
        given.entry("batch_plan").or_insert_with(|| batch::OLDEST.into());
        given.try_into()
    }
}

impl JobSpec {
    /// The job with these fields changed.
    pub fn with(mut self, given: Map<String, Value>) -> Result<Self, Invalid> {
        for (name, value) in read(given)? {
            self.set(&name, value).map_err(Invalid)?;
        }
        Ok(self)
    }

    /// How servers combine gradients: by lanes, or as the three flags about it specify.
    #[must_use]
    pub fn mode(&self) -> Mode {
        if self.is_hybrid() {
            return Mode::Steps { lanes: self.n_lanes() };
        }
        if self.use_async == Some(true) {
            return Mode::Async;
        }
        if self.sync_version_tolerance > 0 {
            return Mode::Bounded { versions: self.sync_version_tolerance };
        }
        match (self.use_async, self.grads_to_wait) {
            (Some(false), grads) => Mode::Sync { grads_to_wait: grads.unwrap_or(1) },
            (None, Some(grads)) => Mode::Sync { grads_to_wait: grads },
            (None | Some(true), _) => Mode::Async,
        }
    }

    /// Whether the workers hold the dense parameters themselves and train in steps.
    fn is_allreduce(&self) -> bool {
        match self.distribution_strategy {
            Strategy::ParameterServer => false,
            Strategy::Allreduce | Strategy::Hybrid | Strategy::Local => {
                self.job_type == JobType::Train
            }
        }
    }

    /// Makes strategy and number of servers agree.
    pub fn settle_strategy(&mut self) {
        if self.job_type != JobType::Train {
            // Servers hold a model while it is used, no matter how it was trained.
            self.distribution_strategy = Strategy::ParameterServer;
            self.num_ps_pods = self.num_ps_pods.max(1);
            self.spares = 0;
            return;
        }
        if self.distribution_strategy == Strategy::ParameterServer && self.num_ps_pods == 0 {
            self.distribution_strategy = Strategy::Allreduce;
        }
        match self.distribution_strategy {
            Strategy::ParameterServer | Strategy::Hybrid => {}
            Strategy::Allreduce => self.num_ps_pods = 0,
            Strategy::Local => {
                // A step stays what it is with one worker: that one runs all lanes.
                self.lanes = Some(self.n_lanes_of_local());
                (self.num_ps_pods, self.num_workers, self.max_workers) = (0, 1, None);
                self.spares = 0;
            }
        }
    }

    /// Whether workers that train in steps leave embedding tables to servers.
    fn is_hybrid(&self) -> bool {
        self.distribution_strategy == Strategy::Hybrid && self.job_type == JobType::Train
    }

    /// Number of parameter servers.
    #[must_use]
    pub fn n_servers(&self) -> u32 {
        if self.is_allreduce() && !self.is_hybrid() { 0 } else { self.num_ps_pods }
    }

    /// Lanes of a step; none if workers push batches to parameter servers instead of training in
    /// steps.
    #[must_use]
    pub fn step_lanes(&self) -> Option<u32> {
        self.is_allreduce().then(|| self.n_lanes())
    }

    /// How the state of a model with `dense_len` dense numbers is divided.
    #[must_use]
    pub fn layout(&self, dense_len: usize) -> Layout {
        match self.is_hybrid() {
            true => Layout::apart(dense_len, self.partitions),
            false => Layout::shared(dense_len, self.partitions),
        }
    }

    /// Whether the job runs a custom training loop.
    #[must_use]
    pub fn is_custom_loop(&self) -> bool {
        !self.job_command.is_empty()
    }

    /// Micro-batches of one AllReduce step.
    #[must_use]
    pub fn n_lanes(&self) -> u32 {
        self.lanes.or(self.max_workers).unwrap_or(self.num_workers).max(1)
    }

    /// Lanes of a job without other workers: one by default.
    #[must_use]
    pub fn n_lanes_of_local(&self) -> u32 {
        self.lanes.or(self.max_workers).unwrap_or(1).max(1)
    }

    /// The plan of batches over a data set of `n_records`. A step of AllReduce is one batch of
    /// it: `lanes::share_out` splits it into lanes.
    #[must_use]
    pub fn plan(&self, n_records: u64) -> BatchPlan {
        let lanes = self.step_lanes().unwrap_or(1);
        BatchPlan {
            version: self.batch_plan,
            n_records,
            minibatch_size: self.minibatch_size.saturating_mul(lanes),
            batches_per_shard: self.num_minibatches_per_task,
            seed: self.seed,
            shuffle: self.shuffle,
        }
    }

    #[must_use]
    pub fn task_timeout(&self) -> Duration {
        Duration::from_secs(u64::from(self.task_timeout_secs))
    }

    /// How long a process waits for the other parts of a round or a step. One worker may have to
    /// compute all of them, one after the other.
    #[must_use]
    pub fn round_timeout(&self) -> Duration {
        let n_parts = match self.mode() {
            Mode::Async | Mode::Bounded { .. } => 1,
            Mode::Sync { grads_to_wait } => grads_to_wait,
            Mode::Steps { lanes } => lanes,
        };
        self.task_timeout() * n_parts.max(1)
    }

    #[must_use]
    pub fn heartbeat_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.heartbeat_timeout_secs)
    }

    /// Refuses to resume a job with a field changed that must stay the same.
    pub fn check_resumed(&self, before: &Self) -> Result<(), Invalid> {
        let (now, then) = (json!(self), json!(before));
        let is_edited = |field: &&Field| now[field.name] != then[field.name];
        let must_stay = |field: &&Field| match field.fixed {
            Fixed::No => false,
            Fixed::Value => is_edited(field),
            Fixed::Derived(facts) => facts(self) != facts(before),
        };
        let changed: Vec<&Field> = FIELDS.iter().filter(must_stay).collect();
        // What follows from several fields changes with any of them; name the one that was edited.
        let edited = changed.iter().copied().find(is_edited);
        match edited.or(changed.first().copied()) {
            None => Ok(()),
            Some(Field { name, .. }) => Err(Invalid(format!(
                "a resumed job cannot change --{name}; leave it out, or start a new job with another --job_name"
            ))),
        }
    }

    /// Refuses what no job can run with; the platform's own checks come after.
    pub fn check(&self) -> Result<(), Invalid> {
        let invalid = |text: &str| Err(Invalid(text.into()));
        self.check_limits()?;
        let name_fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if self.job_name.is_empty()
            || !self.job_name.chars().all(name_fits)
            || self.job_name.starts_with('-')
            || self.job_name.ends_with('-')
            || self.job_name.len() > 50
        {
            return Err(Invalid(format!(
                "job name `{}` must be 1 to 50 characters of a-z, 0-9 and `-`, and `-` cannot be \
                 the first or the last; set --job_name",
                self.job_name
            )));
        }
        if self.minibatch_size == 0 || self.num_minibatches_per_task == 0 {
            return invalid("--minibatch_size and --num_minibatches_per_task must be at least 1");
        }
        if !(batch::OLDEST..=batch::NEWEST).contains(&self.batch_plan) {
            return Err(Invalid(format!(
                "this version of elasticdl does not know batch_plan {}; use the version that \
                 started the job",
                self.batch_plan
            )));
        }
        if self.partitions == 0 || self.num_ps_pods > self.partitions {
            return invalid("--num_ps_pods must not exceed --partitions, which must be at least 1");
        }
        if self.is_allreduce() {
            self.check_workers()?;
        }
        if self.is_hybrid() {
            self.check_hybrid()?;
        }
        if self.spares > 0 && self.is_custom_loop() {
            return invalid(
                "--spares cannot be used with a custom training loop: code after the loop would run \
                 in spares, too, without the trained model; drop --spares",
            );
        }
        if self.clip_norm.is_some_and(|norm| !norm.is_finite() || norm <= 0.0) {
            return invalid("--clip_norm must be a number above 0; leave it out for no clipping");
        }
        if self.grads_to_wait == Some(0) || self.get_model_steps == 0 {
            return invalid("--grads_to_wait and --get_model_steps must be at least 1");
        }
        if self.use_async == Some(true) && self.grads_to_wait.is_some_and(|grads| grads > 1) {
            return invalid("--grads_to_wait needs synchronous training; drop --use_async");
        }
        if self.heartbeat_timeout_secs.is_nan() || self.heartbeat_timeout_secs < 0.5 {
            return invalid("--heartbeat_timeout_secs must be at least 0.5");
        }
        if !is_collector(&self.otlp_endpoint) {
            return Err(Invalid(format!(
                "--otlp_endpoint `{}` is not a collector URL; use http://host:4317 or https://…",
                self.otlp_endpoint
            )));
        }
        if self.track.is_some() && !self.is_custom_loop() {
            return invalid(
                "--track sends what a custom training loop logs; start its script with `elasticdl \
                 run`, or drop --track",
            );
        }
        if self.task_timeout_secs == 0 {
            return invalid("--task_timeout_secs must be at least 1");
        }
        Ok(())
    }

    /// Refuses numbers above the limits of the table.
    fn check_limits(&self) -> Result<(), Invalid> {
        let values = json!(self);
        for Field { name, most, .. } in FIELDS {
            let is_more = |most: &u32| values[*name].as_u64() > Some((*most).into());
            if let Some(most) = most.filter(is_more) {
                return Err(Invalid(format!("--{name} must be at most {most}")));
            }
        }
        Ok(())
    }

    /// Refuses what contradicts steps that workers and servers take together.
    fn check_hybrid(&self) -> Result<(), Invalid> {
        let invalid = |text: &str| Err(Invalid(text.into()));
        if self.num_ps_pods == 0 {
            return invalid(
                "HybridStrategy keeps embedding tables on parameter servers: --num_ps_pods must be \
                 at least 1; without tables use --distribution_strategy=AllreduceStrategy",
            );
        }
        let is_gathered = self.grads_to_wait.is_some_and(|grads| grads > 1);
        if self.use_async == Some(true) || is_gathered || self.sync_version_tolerance > 0 {
            return invalid(
                "HybridStrategy is synchronous: drop --use_async, --grads_to_wait and \
                 --sync_version_tolerance; --lanes sets the number of gradients per step",
            );
        }
        Ok(())
    }

    /// Refuses numbers of workers and lanes that contradict each other.
    fn check_workers(&self) -> Result<(), Invalid> {
        let lanes = self.n_lanes();
        let most = self.max_workers.unwrap_or(lanes);
        if self.lanes == Some(0) || self.threads_per_worker == 0 {
            let why = "--lanes and --threads_per_worker must be at least 1";
            return Err(Invalid(why.into()));
        }
        let asked = self.num_workers.max(self.max_workers.unwrap_or(0));
        if asked > MAX_MEMBERS {
            return Err(Invalid(format!(
                "{asked} workers are too many for AllReduce, where each one connects to all others; \
                 use at most {MAX_MEMBERS}, or ParameterServerStrategy"
            )));
        }
        if self.num_workers.max(most) > lanes {
            return Err(Invalid(format!(
                "{} workers are more than --lanes={lanes}: every worker needs a lane; raise --lanes",
                self.num_workers.max(most)
            )));
        }
        // None at all: they are started manually.
        let is_between = (self.min_workers..=most).contains(&self.num_workers);
        if self.num_workers > 0 && !is_between {
            return Err(Invalid(format!(
                "--num_workers={} must be between --min_workers={} and --max_workers={most}",
                self.num_workers, self.min_workers
            )));
        }
        if u64::from(lanes) * u64::from(self.minibatch_size) > u64::from(u32::MAX) {
            return Err(Invalid("--lanes times --minibatch_size must stay below 2^32".into()));
        }
        Ok(())
    }
}

/// Whether spans can go there: nowhere, or over gRPC to a host.
fn is_collector(endpoint: &str) -> bool {
    let host = ["http://", "https://"].iter().find_map(|scheme| endpoint.strip_prefix(scheme));
    let is_host = |rest: &str| !rest.starts_with(['/', ':']) && !rest.contains(char::is_whitespace);
    endpoint.is_empty() || host.is_some_and(|rest| !rest.is_empty() && is_host(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(given: Value) -> Result<JobSpec, String> {
        serde_json::from_value(given).map_err(|error| error.to_string())
    }

    #[test]
    fn a_value_means_the_same_in_every_form() {
        let spec = read(json!({
            "model_params": {"hidden": [128, 64], "lr": 0.1, "bias": true, "name": "x"},
            "max_time": "2h", "log_level": "warn", "learning_rate": 1, "lanes": null,
        }));
        let spec = spec.unwrap();
        let flag = |name: &str, text| (field(name).unwrap().parse)(text).unwrap();
        let text = "hidden=128,64;lr=0.1;bias=true;name=x";
        assert_eq!(json!(spec.model_params), flag("model_params", text));
        assert_eq!(json!(spec.max_time), flag("max_time", "7200"));
        assert_eq!(json!(spec.log_level), flag("log_level", "WARNING"));
        assert_eq!((spec.learning_rate, spec.lanes), (Some(1.0), None));
        assert_eq!(read(json!(spec)).unwrap(), spec);
    }

    #[test]
    fn a_stored_job_keeps_the_plan_of_batches_that_it_was_started_with() {
        let version = |spec: &JobSpec| spec.plan(100).version;
        let before_versions = read(json!({"job_name": "x", "seed": 7})).unwrap();
        assert_eq!(version(&before_versions), batch::OLDEST);
        let described = json!({"job_name": "x", "seed": 7}).as_object().cloned().unwrap();
        let new = JobSpec::try_from(described).unwrap();
        assert_eq!((version(&new), new.batch_plan), (batch::NEWEST, batch::NEWEST));
        assert_eq!(read(json!(new)).unwrap(), new);
        assert!(new.check_resumed(&before_versions).unwrap_err().0.contains("--batch_plan"));
        let unknown = JobSpec { batch_plan: 3, ..new };
        let expected = "this version of elasticdl does not know batch_plan 3; use the version that \
                        started the job";
        assert_eq!(unknown.check().unwrap_err().0, expected);
    }

    #[test]
    fn what_is_unknown_or_mistyped_is_refused_by_name() {
        for (given, expected) in [
            (json!({"num_worker": 4}), "unknown field `num_worker`; did you mean `num_workers`?"),
            (json!({"zebra": 4}), "unknown field `zebra`; `elasticdl init` lists all fields"),
            (
                json!({"num_workers": "4"}),
                "--num_workers: expected an integer from 0 to 4294967295, found \"4\"",
            ),
            (json!({"port": 65536}), "--port: expected an integer from 0 to 65535, found 65536"),
            (json!({"job_name": 5}), "--job_name: expected text, found 5; put it in quotes"),
            (json!({"shuffle": "yes"}), "--shuffle: expected true or false, found \"yes\""),
            (
                json!({"model_params": 1}),
                "--model_params: expected a map such as {lr: 0.1}, found 1",
            ),
            (
                json!({"codec_type": "json"}),
                "--codec_type: unknown value `json`; use tf_example or bytes",
            ),
            (
                json!({"distribution_strategy": "AllReduceStrategy"}),
                "--distribution_strategy: unknown value `AllReduceStrategy`; did you mean \
                 `AllreduceStrategy`?",
            ),
            (
                json!({"image_pull_policy": "never"}),
                "--image_pull_policy: unknown value `never`; did you mean `Never`?",
            ),
            (
                json!({"restart_policy": "x"}),
                "--restart_policy: unknown value `x`; use Always, OnFailure or Never",
            ),
            (json!({"log_level": "LOUD"}), "--log_level: expected DEBUG, INFO, WARNING or ERROR"),
        ] {
            assert_eq!(read(given).unwrap_err(), expected);
        }
    }

    #[test]
    fn what_no_script_logs_cannot_be_sent_anywhere() {
        let (job_name, track) = ("x".to_owned(), Some(Track::Wandb));
        let track = JobSpec { job_name, track, ..JobSpec::default() };
        assert!(track.check().unwrap_err().0.contains("start its script with `elasticdl run`"));
        let script = JobSpec { job_command: "python train.py".into(), ..track };
        assert_eq!(script.check(), Ok(()));
    }

    #[test]
    fn more_workers_than_can_connect_to_each_other_are_refused() {
        let check = |strategy: &str, given: &str, n: u32| {
            let mut spec =
                json!({"job_name": "x", "distribution_strategy": strategy, "lanes": 4096});
            spec["num_ps_pods"] = json!(u32::from(strategy != "AllreduceStrategy"));
            spec[given] = json!(n);
            read(spec).unwrap().check().map_err(|invalid| invalid.0)
        };
        let expected = "1025 workers are too many for AllReduce, where each one connects to all \
                        others; use at most 1024, or ParameterServerStrategy";
        for given in ["num_workers", "max_workers"] {
            for strategy in ["AllreduceStrategy", "HybridStrategy"] {
                assert_eq!(check(strategy, given, MAX_MEMBERS), Ok(()));
                assert_eq!(check(strategy, given, MAX_MEMBERS + 1).unwrap_err(), expected);
            }
            assert_eq!(check("ParameterServerStrategy", given, MAX_MEMBERS + 1), Ok(()));
        }
    }

    #[test]
    fn pairs_keep_commas_inside_a_value() {
        let flag = |text| (field("model_params").unwrap().parse)(text);
        let expected = json!({"hidden": "128,64", "lr": "0.1", "name": "x=y"});
        assert_eq!(flag("hidden=128,64,lr=0.1; name = x=y ;").unwrap(), expected);
        assert_eq!(flag("").unwrap(), json!({}));
        assert_eq!(flag("lr").unwrap_err(), "expected name=value, got `lr`");
    }

    #[test]
    fn a_short_name_of_a_flag_is_no_field_and_the_field_is_named() {
        let mut known: Vec<&str> = FIELDS.iter().map(|field| field.name).collect();
        for at in FIELDS {
            known.extend(at.aliases);
            for alias in at.aliases {
                let entry = Map::from_iter([((*alias).to_owned(), json!(1))]);
                let error = super::read(entry).unwrap_err().to_string();
                assert_eq!(error, format!("unknown field `{alias}`; did you mean `{}`?", at.name));
            }
            let FieldKind::Choice(names) = at.kind else {
                assert!(at.value_aliases.is_empty(), "only names of choices are shortened");
                continue;
            };
            for (alias, value) in at.value_aliases {
                assert!(names.contains(value) && !names.contains(alias), "{alias}");
                assert_eq!(at.full_value(alias), *value);
                assert!((at.read)(json!(alias)).is_err(), "{alias} is for the command line");
            }
        }
        let n_known = known.len();
        known.sort_unstable();
        known.dedup();
        assert_eq!(known.len(), n_known, "a name has one meaning");
    }

    #[test]
    fn times_take_a_unit() {
        assert_eq!(Seconds::parse("90"), Ok(Seconds(90)));
        assert_eq!(Seconds::parse("2h"), Ok(Seconds(7200)));
        assert!(Seconds::parse("2 weeks").is_err());
        assert!(Seconds::parse("99999999999999999d").is_err());
    }

    #[test]
    fn the_template_is_the_default_job_and_has_every_field() {
        let text = template(&JobSpec::default());
        for field in FIELDS {
            let lines = text.lines().filter(|line| line.starts_with(&format!("{}: ", field.name)));
            assert_eq!(lines.count(), 1, "{}", field.name);
        }
        assert!(
            text.contains(
                "\nminibatch_size: 64              # Records per batch; with AllReduce, records per lane.\n"
            ),
            "{text}"
        );
    }
}
