// SPDX-License-Identifier: Apache-2.0
//! A training step through the whole system with one worker, against the same model in a bare
//! loop of its engine.

#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a program that prints speeds"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use edl_core::id::BatchId;
use edl_core::optimizer::{OptimizerKind, OptimizerSpec};
use edl_core::spec::JobSpec;
use edl_data::{Codec, Dataset, OpenOptions};
use edl_tensor::init::InitialValues;
use edl_tensor::model::{Gradient, Inputs};
use edl_tensor::optimizer::{Optimizer, Step};

/// The model, and how many epochs make a run long enough to time.
const MODELS: [(&str, u32); 2] = [("mnist_cnn", 2), ("mnist_mlp", 30)];
const BARE_SECS: f64 = 5.0;

fn main() -> anyhow::Result<()> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fashion_mnist/train");
    for (model, epochs) in MODELS {
        for (strategy, n_ps) in [("AllReduce", 0), ("parameter server", 1)] {
            let bare = bare_loop(model, &data)?;
            let framework = whole_system(model, epochs, n_ps, &data)?;
            println!(
                "{model}, {strategy}: through the system {framework:.0} records/s, bare engine loop \
                 {bare:.0} records/s: {:.0} % (target >= 95 %)",
                100.0 * framework / bare
            );
        }
    }
    Ok(())
}

/// Forward, backward and the same Adam as the system's, on one thread: what a step costs without
/// the system. Decoding is left out, which favours it.
fn bare_loop(model_def: &str, data: &Path) -> anyhow::Result<f64> {
    let spec = JobSpec { model_def: model_def.into(), ..JobSpec::default() };
    let mut model = edl_zoo::open(&spec)?;
    let options = OpenOptions { codec: Codec::TfExample, params: Default::default() };
    let dataset = Dataset::open(&data.to_string_lossy(), &options)?;
    let plan = spec.plan(dataset.n_records());
    let fields = model.spec().inputs.clone();
    let batches =
        (0..32).map(|index| dataset.batch(&plan.records(BatchId { epoch: 0, index }), &fields));
    let batches = batches.collect::<Result<Vec<_>, _>>()?;
    let mut dense = Vec::new();
    for param in &model.spec().params {
        let first = dense.len();
        dense.resize(first + param.len(), 0.0);
        InitialValues::param(param.init, 0, &param.name).fill(0, &mut dense[first..]);
    }
    let (mut means, mut squares) = (vec![0.0_f32; dense.len()], vec![0.0_f32; dense.len()]);
    let mut gradient = Gradient { dense: vec![0.0; dense.len()], rows: Vec::new() };
    let kind = OptimizerKind::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false };
    let adam = Optimizer::new(OptimizerSpec::new(kind, 0.001));
    let (mut n_records, mut start) = (0, Instant::now());
    for (step, batch) in batches.iter().cycle().enumerate() {
        if step == 8 {
            // Warm by now.
            (n_records, start) = (0, Instant::now());
        }
        model.train(Inputs { batch, dense: &dense, rows: &[] }, 1, &mut gradient)?;
        let age = step as u64 + 1;
        let update = adam.update(Step { version: age - 1, age, staleness: 1 });
        update.apply(&mut dense, [&mut means, &mut squares, &mut []], &gradient.dense, true);
        n_records += batch.len();
        if start.elapsed().as_secs_f64() > BARE_SECS {
            break;
        }
    }
    Ok(n_records as f64 / start.elapsed().as_secs_f64())
}

/// A real job with one worker; its speed between the first and the last report.
fn whole_system(model: &str, epochs: u32, n_ps: u32, data: &Path) -> anyhow::Result<f64> {
    let home = tempfile::tempdir()?;
    let status = Command::new(binary()?)
        .env("ELASTICDL_HOME", home.path())
        .args(["train", "--job_name=bench", "--num_workers=1"])
        .arg(format!("--num_ps_pods={n_ps}"))
        .arg(format!("--model_def={model}"))
        .arg(format!("--training_data={}", data.display()))
        .arg(format!("--num_epochs={epochs}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    anyhow::ensure!(status.success(), "the job ended with {status}");
    let lines = std::fs::read_to_string(home.path().join("jobs/bench/metrics.jsonl"))?;
    let points: Vec<(f64, f64)> = lines
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|point| point["kind"] == "training")
        .filter_map(|point| Some((point["at_secs"].as_f64()?, point["records_done"].as_f64()?)))
        .collect();
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        anyhow::bail!("the job was too short to time");
    };
    anyhow::ensure!(last.0 > first.0, "the job was too short to time");
    Ok((last.1 - first.1) / (last.0 - first.0))
}

/// The command, built next to this program.
fn binary() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().and_then(Path::parent).ok_or_else(|| anyhow::anyhow!("no folder"))?;
    let binary = folder.join("elasticdl");
    anyhow::ensure!(binary.exists(), "`{}` is not there; run `make` first", binary.display());
    Ok(binary)
}
