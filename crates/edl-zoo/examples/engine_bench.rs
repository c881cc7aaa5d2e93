// SPDX-License-Identifier: Apache-2.0
//! How fast the built-in models compute a gradient, against the same models in PyTorch.
//!
//! `cargo run --release -p edl-zoo --example engine_bench`: both sides live at once and take turns,
//! one thread each; a figure is the median of their turns. A step is forward and backward without
//! an optimizer, pixels made into numbers included. `ELASTICDL_TEST_PYTHON` names a Python with
//! torch. Names of models leave the others out: `… --example engine_bench mnist_cnn`.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints, and fails loudly"
)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use edl_core::model::{DType, FieldSpec};
use edl_core::platform::WORKER_VARIABLES;
use edl_core::rng::Rng;
use edl_core::spec::JobSpec;
use edl_tensor::batch::{Batch, Column};
use edl_tensor::init::InitialValues;
use edl_tensor::model::{Gradient, Inputs, Model};

/// Names and values.
type Params = &'static [(&'static str, &'static str)];

/// Model, its parameters, records of a batch, and steps of a turn.
const CASES: [(&str, Params, usize, usize); 5] = [
    ("mnist_mlp", &[("hidden", "128")], 64, 400),
    ("mnist_mlp", &[("hidden", "512")], 64, 150),
    ("mnist_cnn", &[], 64, 4),
    ("deepfm", &[("dim", "8"), ("hidden", "64")], 512, 200),
    ("deepfm", &[("dim", "16"), ("hidden", "400")], 512, 60),
];
const TURNS: usize = 9;

fn main() {
    let only: Vec<String> = std::env::args().skip(1).collect();
    let mut torch = Torch::start();
    println!("{}", edl_zoo::instruction_set());
    for (model, params, n_records, n_steps) in CASES {
        if !only.is_empty() && !only.iter().any(|name| name == model) {
            continue;
        }
        let mut ours = Ours::open(model, params, n_records);
        let params: Vec<String> =
            params.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let words = format!("{model} {n_records} {n_steps} {}", params.join(" "));
        let (mut our_costs, mut torch_costs) = (Vec::new(), Vec::new());
        // The first turn warms up.
        for turn in 0..=TURNS {
            let costs = (ours.time(n_steps), torch.as_mut().map(|torch| torch.time(&words)));
            if turn > 0 {
                our_costs.push(costs.0);
                torch_costs.extend(costs.1);
            }
        }
        print(
            &format!("{model} {} ({n_records} records)", params.join(" ")),
            our_costs,
            torch_costs,
        );
    }
}

/// In seconds per step.
#[derive(Clone, Copy)]
struct Cost {
    time: f64,
    cpu: f64,
}

fn print(name: &str, ours: Vec<Cost>, torch: Vec<Cost>) {
    let middle = |costs: &[Cost], part: fn(&Cost) -> f64| {
        let mut parts: Vec<f64> = costs.iter().map(part).collect();
        parts.sort_by(f64::total_cmp);
        parts[parts.len() / 2] * 1e3
    };
    let (time, cpu) = (middle(&ours, |c| c.time), middle(&ours, |c| c.cpu));
    if torch.is_empty() {
        println!("{name}: {time:.3} ms, processor {cpu:.3} ms");
        return;
    }
    let (torch_time, torch_cpu) = (middle(&torch, |c| c.time), middle(&torch, |c| c.cpu));
    println!(
        "{name}: {time:.3} ms, torch {torch_time:.3} ms: {:.2}x torch    processor {cpu:.3} ms, \
         torch {torch_cpu:.3} ms: {:.2}x torch",
        torch_time / time,
        torch_cpu / cpu
    );
}

/// A built-in model with a batch of random records.
struct Ours {
    model: Box<dyn Model>,
    batch: Batch,
    dense: Vec<f32>,
    rows: Vec<Vec<f32>>,
    gradient: Gradient,
}

impl Ours {
    fn open(name: &str, params: Params, n_records: usize) -> Self {
        let model_params =
            params.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        let spec = JobSpec { model_def: name.into(), model_params, ..JobSpec::default() };
        let model = edl_zoo::open(&spec).unwrap();
        let mut rng = Rng::new(1);
        let fields = model.spec().inputs.iter();
        let columns: BTreeMap<String, Column> =
            fields.map(|field| (field.name.clone(), column(field, n_records, &mut rng))).collect();
        let batch = Batch { records: (0..n_records as u64).collect(), columns, ..Batch::default() };
        let mut dense = Vec::new();
        for param in &model.spec().params {
            let first = dense.len();
            dense.resize(first + param.len(), 0.0);
            InitialValues::param(param.init, 0, &param.name).fill(0, &mut dense[first..]);
        }
        let lookups = model.lookups(&batch).unwrap();
        let tables = model.spec().tables.iter().zip(lookups);
        let rows = tables.map(|(table, ids)| vec![0.01; ids.len() * table.dim]).collect();
        Self { model, batch, dense, rows, gradient: Gradient::default() }
    }

    fn time(&mut self, n_steps: usize) -> Cost {
        let inputs = Inputs { batch: &self.batch, dense: &self.dense, rows: &self.rows };
        let (start, start_cpu) = (Instant::now(), cpu());
        for step in 0..n_steps {
            self.model.train(inputs, step as u64, &mut self.gradient).unwrap();
        }
        let n_steps = f64::from(u32::try_from(n_steps).unwrap());
        Cost { time: start.elapsed().as_secs_f64() / n_steps, cpu: (cpu() - start_cpu) / n_steps }
    }
}

fn column(field: &FieldSpec, n: usize, rng: &mut Rng) -> Column {
    let shape = [&[n], field.shape.as_slice()].concat();
    let len: usize = shape.iter().product();
    let mut draw = |limit: u64| u8::try_from(rng.below(limit)).unwrap();
    match field.dtype {
        DType::U8 => Column::U8 { shape, values: (0..len).map(|_| draw(256)).collect() },
        DType::F32 => {
            Column::F32 { shape, values: (0..len).map(|_| f32::from(draw(100))).collect() }
        }
        DType::I64 => Column::I64 { shape, values: (0..len).map(|_| i64::from(draw(2))).collect() },
        DType::Bytes | DType::Record => Column::Bytes((0..n).map(|_| vec![draw(50)]).collect()),
    }
}

/// Processor time of this process so far, in seconds.
fn cpu() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap().as_secs_f64()
}

/// A process that computes the same steps with torch.
struct Torch {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Torch {
    fn start() -> Option<Self> {
        let python = std::env::var("ELASTICDL_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/python/engine_bench.py");
        // As workers are started: the C library keeps a step's memory, which favours torch.
        let mut child = Command::new(python)
            .arg(script)
            .envs(WORKER_VARIABLES)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take()?).lines();
        let mut torch = Self { child, stdin, stdout };
        let answer = torch.hear();
        if answer == "ready" {
            return Some(torch);
        }
        println!("torch is left out: {answer}");
        None
    }

    fn hear(&mut self) -> String {
        self.stdout.next().unwrap().unwrap()
    }

    fn time(&mut self, words: &str) -> Cost {
        writeln!(self.stdin.as_mut().unwrap(), "{words}").unwrap();
        let answer = self.hear();
        let (time, cpu) = answer.split_once(' ').unwrap();
        Cost { time: time.parse().unwrap(), cpu: cpu.parse().unwrap() }
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        self.stdin = None;
        drop(self.child.wait());
    }
}
