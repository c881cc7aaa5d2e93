// SPDX-License-Identifier: Apache-2.0
//! Which optimizer a job uses: the model's own, changed by the job's flags.
//!
//! Pure: the master resolves the same optimizer as the workers and servers.

use std::str::FromStr;

use crate::model::ModelSpec;
use crate::optimizer::{Clip, OptimizerKind, OptimizerSpec, Schedule};
use crate::spec::{AllreduceDtype, JobSpec, JobType};

/// The values of `--optimizer`, in the order of error messages.
pub const NAMES: [&str; 13] = [
    "sgd", "momentum", "nesterov", "adam", "amsgrad", "adamw", "adagrad", "rmsprop", "ftrl",
    "adadelta", "adamax", "nadam", "lion",
];

/// The forms of `--learning_rate_schedule`.
const SCHEDULES: &str = "constant, steps:1000,2000:0.1, exponential:1000:0.9, \
                         cosine:WARMUP:TOTAL, cosine:WARMUP:TOTAL:FLOOR or linear:WARMUP:TOTAL";

/// What is wrong with the flags that choose an optimizer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("unknown --optimizer `{name}`; choose from {}", NAMES.join(", "))]
    Name { name: String },
    #[error("{flag} `{value}` must be {needs}")]
    Number { flag: &'static str, value: String, needs: &'static str },
    #[error("{flag} has no effect: the training script takes its own optimizer steps")]
    Script { flag: &'static str },
    #[error(
        "the training script takes its own optimizer steps, which parameter servers cannot do; use --distribution_strategy=AllreduceStrategy, or take the steps in Rust (ELASTICDL_STEP=rust)"
    )]
    ScriptOnServers,
    #[error(
        "--allreduce_dtype=bf16 would round gradients of the float64 parameter `{parameter}` to 16 bits; use --allreduce_dtype=f32, which leaves them as they are"
    )]
    HalfOfDouble { parameter: String },
}

/// The optimizer of a job: the model's own unless `--optimizer` names another, which then starts
/// from Keras' default numbers. `--learning_rate` wins over the model parameter `lr`.
pub fn resolve(spec: &JobSpec, model: &ModelSpec) -> Result<OptimizerSpec, Error> {
    if model.optimizer.is_script() {
        return script(spec, model);
    }
    let mut chosen = match &spec.optimizer {
        None => model.optimizer.clone(),
        Some(name) => {
            let named = by_name(name).ok_or_else(|| Error::Name { name: name.clone() })?;
            // A model's own numbers are better than a library's.
            let is_own = same_kind(&named.kind, &model.optimizer.kind);
            if is_own { model.optimizer.clone() } else { named }
        }
    };
    if let Some(text) = spec.model_params.get("lr") {
        let rate = text.trim().parse().unwrap_or(f64::NAN);
        chosen.learning_rate = learning_rate("--model_params lr", rate, text)?;
    }
    if let Some(rate) = spec.learning_rate {
        chosen.learning_rate = learning_rate("--learning_rate", rate, &rate.to_string())?;
    }
    if let Some(decay) = spec.weight_decay {
        if !(0.0..=1.0).contains(&decay) {
            let (flag, needs) = ("--weight_decay", "a number from 0 to 1");
            return Err(Error::Number { flag, value: decay.to_string(), needs });
        }
        chosen.weight_decay = decay;
    }
    if let Some(schedule) = &spec.learning_rate_schedule {
        chosen.schedule = Schedule::clone(schedule);
    }
    if let Some(norm) = spec.clip_norm {
        chosen.clip = Some(Clip::GlobalNorm(norm));
    }
    Ok(chosen)
}

/// No flag changes the steps of a training script, and only workers of AllReduce take them.
fn script(spec: &JobSpec, model: &ModelSpec) -> Result<OptimizerSpec, Error> {
    if spec.job_type == JobType::Train && spec.step_lanes().is_none() {
        return Err(Error::ScriptOnServers);
    }
    let double = model.params.iter().find(|param| param.is_double);
    if let (Some(param), AllreduceDtype::Bf16) = (double, spec.allreduce_dtype) {
        return Err(Error::HalfOfDouble { parameter: param.name.clone() });
    }
    let flags = [
        (spec.optimizer.is_some(), "--optimizer"),
        (spec.learning_rate.is_some(), "--learning_rate"),
        (spec.weight_decay.is_some(), "--weight_decay"),
        (spec.learning_rate_schedule.is_some(), "--learning_rate_schedule"),
        (spec.clip_norm.is_some(), "--clip_norm"),
    ];
    match flags.into_iter().find(|(is_set, _)| *is_set) {
        Some((_, flag)) => Err(Error::Script { flag }),
        None => Ok(model.optimizer.clone()),
    }
}

/// How a worker of the job clips gradients. Values that [`resolve`] rejects clip nothing: such a job
/// does not start.
#[must_use]
pub fn clip(spec: &JobSpec, model: &ModelSpec) -> Option<Clip> {
    resolve(spec, model).ok()?.clip
}

fn learning_rate(flag: &'static str, rate: f64, text: &str) -> Result<f64, Error> {
    if rate.is_finite() && rate > 0.0 {
        Ok(rate)
    } else {
        Err(Error::Number { flag, value: text.into(), needs: "a number above 0" })
    }
}

/// An optimizer with the default numbers of Keras 3.
fn by_name(name: &str) -> Option<OptimizerSpec> {
    let (beta_1, beta_2, epsilon) = (0.9, 0.999, 1e-7);
    let adam = |amsgrad| OptimizerKind::Adam { beta_1, beta_2, epsilon, amsgrad };
    let momentum = |nesterov| OptimizerKind::Momentum { momentum: 0.9, nesterov, dampening: 0.0 };
    let (kind, learning_rate) = match name.to_ascii_lowercase().as_str() {
        "sgd" => (OptimizerKind::Sgd, 0.01),
        "momentum" => (momentum(false), 0.01),
        "nesterov" => (momentum(true), 0.01),
        "adam" => (adam(false), 0.001),
        "amsgrad" => (adam(true), 0.001),
        "adamw" => {
            let kind = OptimizerKind::AdamW { beta_1, beta_2, epsilon };
            return Some(OptimizerSpec { weight_decay: 0.004, ..OptimizerSpec::new(kind, 0.001) });
        }
        "adagrad" => (OptimizerKind::Adagrad { initial_accumulator: 0.1, epsilon }, 0.001),
        "rmsprop" => {
            let (rho, momentum, centered) = (0.9, 0.0, false);
            (OptimizerKind::RmsProp { rho, epsilon, momentum, centered }, 0.001)
        }
        "ftrl" => {
            let (learning_rate_power, initial_accumulator) = (-0.5, 0.1);
            let (l1, l2, l2_shrinkage, beta) = (0.0, 0.0, 0.0, 0.0);
            let kind = OptimizerKind::Ftrl {
                learning_rate_power,
                l1,
                l2,
                initial_accumulator,
                l2_shrinkage,
                beta,
            };
            (kind, 0.001)
        }
        "adadelta" => (OptimizerKind::Adadelta { rho: 0.95, epsilon }, 0.001),
        "adamax" => (OptimizerKind::Adamax { beta_1, beta_2, epsilon }, 0.001),
        "nadam" => (OptimizerKind::Nadam { beta_1, beta_2, epsilon, momentum_decay: 1.0 }, 0.001),
        "lion" => (OptimizerKind::Lion { beta_1, beta_2: 0.99 }, 0.001),
        _ => return None,
    };
    Some(OptimizerSpec::new(kind, learning_rate))
}

/// Whether two optimizers go by the same name.
fn same_kind(a: &OptimizerKind, b: &OptimizerKind) -> bool {
    kind_name(a) == kind_name(b)
}

fn kind_name(kind: &OptimizerKind) -> &'static str {
    match kind {
        OptimizerKind::Sgd => "sgd",
        OptimizerKind::Momentum { nesterov: false, .. } => "momentum",
        OptimizerKind::Momentum { nesterov: true, .. } => "nesterov",
        OptimizerKind::Adam { amsgrad: false, .. } => "adam",
        OptimizerKind::Adam { amsgrad: true, .. } => "amsgrad",
        OptimizerKind::AdamW { .. } => "adamw",
        OptimizerKind::Adagrad { .. } => "adagrad",
        OptimizerKind::RmsProp { .. } => "rmsprop",
        OptimizerKind::Ftrl { .. } => "ftrl",
        OptimizerKind::Adadelta { .. } => "adadelta",
        OptimizerKind::Adamax { .. } => "adamax",
        OptimizerKind::Nadam { .. } => "nadam",
        OptimizerKind::Lion { .. } => "lion",
        OptimizerKind::Script { .. } => "script",
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        schedule(text).ok_or_else(|| format!("`{text}` is not a schedule; use {SCHEDULES}"))
    }
}

/// Reads a schedule, none if the text is not one.
fn schedule(text: &str) -> Option<Schedule> {
    let parts: Vec<&str> = text.trim().split(':').collect();
    match parts.as_slice() {
        ["constant"] => Some(Schedule::Constant),
        ["steps", steps, factor] => {
            let steps: Vec<u64> = steps.split(',').map(step).collect::<Option<_>>()?;
            let factor = positive(factor)?;
            steps.is_sorted_by(|a, b| a < b).then_some(Schedule::Steps { steps, factor })
        }
        ["exponential", every, factor] => {
            let every = step(every).filter(|every| *every > 0)?;
            Some(Schedule::Exponential { every, factor: positive(factor)?, staircase: false })
        }
        ["cosine", warmup, total] => cosine(warmup, total, "0"),
        ["cosine", warmup, total, floor] => cosine(warmup, total, floor),
        ["linear", warmup, total] => {
            let (warmup, total) = ramp(warmup, total)?;
            Some(Schedule::Linear { warmup, total })
        }
        _ => None,
    }
}

fn cosine(warmup: &str, total: &str, floor: &str) -> Option<Schedule> {
    let (warmup, total) = ramp(warmup, total)?;
    let floor = floor.trim().parse().ok().filter(|floor| (0.0..=1.0).contains(floor))?;
    Some(Schedule::Cosine { warmup, total, floor, start: None, waves: false })
}

fn ramp(warmup: &str, total: &str) -> Option<(u64, u64)> {
    let (warmup, total) = (step(warmup)?, step(total)?);
    (warmup < total).then_some((warmup, total))
}

fn step(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

fn positive(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|value: &f64| value.is_finite() && *value > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Init, ParamSpec, Rule};
    use crate::spec::{FieldType as _, Parsed, Strategy};

    fn model(optimizer: OptimizerSpec) -> ModelSpec {
        let name = "test".into();
        ModelSpec {
            name,
            params: vec![],
            tables: vec![],
            inputs: vec![],
            metrics: vec![],
            optimizer,
        }
    }

    fn with_schedule(text: &str) -> Result<Schedule, String> {
        let learning_rate_schedule = Some(Parsed::parse(text)?);
        let spec = JobSpec { learning_rate_schedule, ..JobSpec::default() };
        Ok(resolve(&spec, &model(OptimizerSpec::sgd(0.5))).unwrap().schedule)
    }

    #[test]
    fn a_job_that_sets_nothing_gets_the_models_own() {
        let own = OptimizerSpec { weight_decay: 0.25, ..OptimizerSpec::sgd(0.5) };
        assert_eq!(resolve(&JobSpec::default(), &model(own.clone())), Ok(own.clone()));
        let spec = JobSpec { optimizer: Some("sgd".into()), ..JobSpec::default() };
        assert_eq!(resolve(&spec, &model(own.clone())), Ok(own));
    }

    #[test]
    fn no_flag_changes_the_steps_of_a_training_script() {
        let script = model(OptimizerSpec::new(OptimizerKind::Script { nonfinite: false }, 1.0));
        let spec = |distribution_strategy, clip_norm| JobSpec {
            distribution_strategy,
            clip_norm,
            ..JobSpec::default()
        };
        let plain = spec(Strategy::Allreduce, None);
        assert_eq!(resolve(&plain, &script).unwrap(), script.optimizer);
        let servers = spec(Strategy::ParameterServer, None);
        assert_eq!(resolve(&servers, &script), Err(Error::ScriptOnServers));
        let spec = spec(Strategy::Allreduce, Some(1.0));
        let error = resolve(&spec, &script).unwrap_err().to_string();
        assert!(error.starts_with("--clip_norm has no effect"), "{error}");
    }

    #[test]
    fn float64_gradients_are_never_rounded_to_16_bits() {
        let mut script = model(OptimizerSpec::new(OptimizerKind::Script { nonfinite: false }, 1.0));
        let rule = Rule::Trainable { decay: false };
        let param = ParamSpec::new("wide", vec![2], Init::Given, rule);
        script.params = vec![ParamSpec { is_double: true, ..param }];
        let mut spec = JobSpec { distribution_strategy: Strategy::Allreduce, ..JobSpec::default() };
        assert!(resolve(&spec, &script).is_ok());
        spec.allreduce_dtype = AllreduceDtype::Bf16;
        let error = resolve(&spec, &script).unwrap_err().to_string();
        assert!(error.contains("would round gradients of the float64 parameter `wide`"), "{error}");
    }

    #[test]
    fn every_name_is_known_and_means_itself() {
        for name in NAMES {
            assert_eq!(kind_name(&by_name(name).unwrap().kind), name);
            assert_eq!(by_name(name), by_name(&name.to_ascii_uppercase()));
        }
        let spec = JobSpec { optimizer: Some("adm".into()), ..JobSpec::default() };
        let error = resolve(&spec, &model(OptimizerSpec::sgd(0.5))).unwrap_err();
        let expected = "unknown --optimizer `adm`; choose from sgd, momentum, nesterov, adam, \
                        amsgrad, adamw, adagrad, rmsprop, ftrl, adadelta, adamax, nadam, lion";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn the_flag_wins_over_the_model_parameter() {
        let mut spec = JobSpec { optimizer: Some("ftrl".into()), ..JobSpec::default() };
        spec.model_params.insert("lr".into(), "0.2".into());
        let rate = |spec: &JobSpec| {
            resolve(spec, &model(OptimizerSpec::sgd(0.5))).map(|found| found.learning_rate)
        };
        assert_eq!(rate(&spec), Ok(0.2));
        spec.learning_rate = Some(0.3);
        assert_eq!(rate(&spec), Ok(0.3));
        spec.learning_rate = Some(-1.0);
        assert!(rate(&spec).is_err());
        spec.model_params.insert("lr".into(), "fast".into());
        let expected = "--model_params lr `fast` must be a number above 0";
        assert_eq!(rate(&spec).unwrap_err().to_string(), expected);
    }

    #[test]
    fn the_jobs_clipping_wins_over_the_models_own() {
        let own = model(OptimizerSpec { clip: Some(Clip::Value(0.5)), ..OptimizerSpec::sgd(0.5) });
        let mut spec = JobSpec::default();
        assert_eq!(clip(&spec, &own), Some(Clip::Value(0.5)));
        spec.clip_norm = Some(2.0);
        assert_eq!(clip(&spec, &own), Some(Clip::GlobalNorm(2.0)));
        let other = JobSpec { optimizer: Some("adam".into()), ..JobSpec::default() };
        assert_eq!(clip(&other, &own), None, "it goes with the optimizer that has it");
    }

    #[test]
    fn a_negative_weight_decay_is_refused() {
        let spec = JobSpec { weight_decay: Some(-0.1), ..JobSpec::default() };
        assert!(resolve(&spec, &model(OptimizerSpec::sgd(0.5))).is_err());
    }

    #[test]
    fn schedules_read_as_the_flag_documents_them() {
        let steps = Schedule::Steps { steps: vec![1000, 2000], factor: 0.1 };
        assert_eq!(with_schedule("steps:1000,2000:0.1"), Ok(steps));
        let exponential = Schedule::Exponential { every: 1000, factor: 0.9, staircase: false };
        assert_eq!(with_schedule("exponential:1000:0.9"), Ok(exponential));
        let (start, waves) = (None, false);
        let cosine = Schedule::Cosine { warmup: 100, total: 10_000, floor: 0.0, start, waves };
        assert_eq!(with_schedule("cosine:100:10000"), Ok(cosine));
        let linear = Schedule::Linear { warmup: 100, total: 10_000 };
        assert_eq!(with_schedule("linear:100:10000"), Ok(linear));
        assert_eq!(with_schedule("constant"), Ok(Schedule::Constant));
    }

    #[test]
    fn a_schedule_that_makes_no_sense_is_refused() {
        let senseless = [
            "",
            "cosine",
            "cosine:10:10",
            "cosine:1:2:3",
            "steps:2,1:0.5",
            "steps:1:-1",
            "steps::0.5",
            "exponential:0:0.9",
            "exponential:5:nan",
            "linear:5:four",
        ];
        for text in senseless {
            let why = with_schedule(text).unwrap_err();
            assert!(
                why.starts_with(&format!("`{text}` is not a schedule; use constant, ")),
                "{why}"
            );
        }
    }
}
