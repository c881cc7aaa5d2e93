// SPDX-License-Identifier: Apache-2.0
//! Trains a built-in image model in a bare loop of the engine, without master, servers or
//! sockets, and prints its speed: what a job's speed is compared with.
//!
//! `cargo run --release -p edl-zoo --example bare_loop -- mnist_cnn 64 50`
//!
//! The figure per CPU second is the one to compare on a machine that others use too.

use std::io::{self, Write};
use std::time::Instant;

use edl_core::model::{Init, ParamSpec};
use edl_core::rng::Rng;
use edl_core::spec::JobSpec;
use edl_tensor::batch::{Batch, Column};
use edl_tensor::model::{Gradient, Inputs};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model_def = args.next().unwrap_or_else(|| "mnist_cnn".into());
    let batch_size: usize = args.next().map_or(Ok(64), |text| text.parse())?;
    let n_steps: u32 = args.next().map_or(Ok(50), |text| text.parse())?;

    let mut model = edl_zoo::open(&JobSpec { model_def, ..JobSpec::default() })?;
    let mut rng = Rng::new(0);
    let first: Vec<f32> =
        model.spec().params.iter().flat_map(|param| first_values(param, &mut rng)).collect();
    let batch = images(batch_size, &mut rng);
    let mut gradient = Gradient::default();
    let inputs = Inputs { batch: &batch, dense: &first, rows: &[] };
    model.train(inputs, 0, &mut gradient)?;

    let (started, cpu) = (Instant::now(), cpu_seconds());
    for step in 0..n_steps {
        model.train(inputs, u64::from(step), &mut gradient)?;
    }
    let n_samples = f64::from(n_steps) * f64::from(u32::try_from(batch_size)?);
    let wall = n_samples / started.elapsed().as_secs_f64();
    let cpu = cpu.zip(cpu_seconds()).map_or(f64::NAN, |(a, b)| n_samples / (b - a));
    writeln!(
        io::stdout(),
        "{}: {wall:.0} samples/s, {cpu:.0} samples per CPU second, {}",
        model.spec().name,
        edl_zoo::instruction_set()
    )?;
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "first values need no more digits")]
fn first_values(param: &ParamSpec, rng: &mut Rng) -> Vec<f32> {
    let mut draw = || match param.init {
        Init::Constant(value) => value,
        Init::Uniform { low, high } => low + (high - low) * rng.unit() as f32,
        Init::Normal { mean, std } | Init::TruncatedNormal { mean, std } => {
            mean + std * (rng.unit() as f32 - 0.5)
        }
    };
    (0..param.len()).map(|_| draw()).collect()
}

fn images(n: usize, rng: &mut Rng) -> Batch {
    let pixels = (0..n * 784).map(|_| rng.next_u64().to_le_bytes()[0]).collect();
    let labels = (0..10).cycle().take(n).collect();
    Batch {
        records: (0..n as u64).collect(),
        columns: [
            ("image".to_owned(), Column::U8 { shape: vec![n, 28, 28], values: pixels }),
            ("label".to_owned(), Column::I64 { shape: vec![n], values: labels }),
        ]
        .into(),
    }
}

/// Time on a processor so far, where the system tells it.
fn cpu_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/schedstat").ok()?;
    let nanoseconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds / 1e9)
}
