// SPDX-License-Identifier: Apache-2.0
//! The Python interpreter that runs a job's Python model, if this process is not one.

use std::ffi::OsString;
use std::io::{Seek as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use edl_core::model::ModelSpec;
use edl_core::platform::Ended;
use edl_core::spec::JobSpec;
use edl_data::{Dataset, OpenOptions};

use crate::console::{self, eprint};
use crate::exit::{Exit, refuse};
use crate::fork_server::{self, Finished, ForkServer};
use crate::host;
use crate::jobs::Job;
use crate::shipped;

/// Selects the interpreter.
const PYTHON: &str = "ELASTICDL_PYTHON";
/// A model may read much data when it is opened, or be large when it is exported.
const LIMIT: Duration = Duration::from_secs(3600);

/// Starts this command in an interpreter: a program and its first arguments.
pub(crate) fn command() -> Vec<OsString> {
    let host = host::get();
    if host.python.is_some() {
        return host.command.clone();
    }
    vec![interpreter(), "-m".into(), "elasticdl".into()]
}

/// The interpreter of the environment variable, of this process, of the virtual environment, next to
/// this program, or on the PATH.
pub(crate) fn interpreter() -> OsString {
    let named = std::env::var_os(PYTHON).filter(|path| !path.is_empty());
    let host = host::get();
    // Not its executable: behind a virtual environment's link is an interpreter without packages.
    let own = || host.python.is_some().then(|| host.command[0].clone());
    let environment =
        || Some(PathBuf::from(std::env::var_os("VIRTUAL_ENV")?).join("bin").join("python"));
    let beside = || Some(std::env::current_exe().ok()?.parent()?.join("python"));
    let found = |path: Option<PathBuf>| path.filter(|path| path.is_file()).map(OsString::from);
    named
        .or_else(own)
        .or_else(|| found(environment()))
        .or_else(|| found(beside()))
        .unwrap_or_else(|| "python3".into())
}

/// A job with what the user's module adds to it.
#[derive(serde::Serialize, serde::Deserialize)]
pub(crate) struct Described {
    pub(crate) model: ModelSpec,
    /// With the data of a custom reader.
    pub(crate) spec: JobSpec,
}

/// The input of `describe`.
#[derive(serde::Serialize, serde::Deserialize)]
struct DescribeInput {
    spec: JobSpec,
    /// As the user described it.
    original: JobSpec,
}

/// This command in an interpreter.
pub(crate) fn this_command(spec: &JobSpec) -> Command {
    let words = command();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).envs(environment(spec));
    command
}

/// Describes the job's model in a separate interpreter, so the user's code cannot affect this
/// process. `original` is the job as the user described it, with unchanged paths.
pub(crate) fn describe(
    spec: &JobSpec,
    original: &JobSpec,
    forks: Option<&ForkServer>,
) -> anyhow::Result<Described> {
    let mut command = this_command(spec);
    let program = command.get_program().to_string_lossy().into_owned();
    command.arg("describe");
    let input = DescribeInput { spec: spec.clone(), original: original.clone() };
    let input = serde_json::to_vec(&input).context("cannot write the job description")?;
    let ran = fork_server::run(forks, command, &input, LIMIT).map_err(|error| {
        refuse(format!(
            "model `{}` is a Python module, but `{program}` cannot be started: {error}; set \
             {PYTHON} to an interpreter that has the elasticdl package",
            spec.model_def
        ))
    })?;
    let Some(Finished { how, stdout, stderr }) = ran else {
        return Err(refuse(format!("model `{}` did not open within an hour", spec.model_def)));
    };
    if how == Ended::Exit(0) {
        let line = stdout.lines().next_back().unwrap_or_default();
        return serde_json::from_str(line).context("cannot read the model's description");
    }
    if stderr.contains("No module named elasticdl") {
        return Err(refuse(format!(
            "model `{}` is a Python module, but `{program}` has no elasticdl package; install it \
             with `pip install elasticdl`, or set {PYTHON} to another interpreter",
            spec.model_def
        )));
    }
    let stderr = stderr.trim();
    if how == Ended::Exit(i32::from(Exit::BadInput.code())) {
        // Before it, there can be warnings of the user's packages.
        let (warnings, error) = stderr.split_once("\nerror: ").unwrap_or(("", stderr));
        warnings.lines().for_each(eprint);
        return Err(refuse(error.strip_prefix("error: ").unwrap_or(error).to_owned()));
    }
    anyhow::bail!("cannot open the model ({how}): {stderr}")
}

/// Prints the description of the model of the job on standard input. A model that cannot take the
/// first batch of its data is refused.
pub(crate) fn print_description(out: &mut dyn std::io::Write) -> anyhow::Result<Exit> {
    let DescribeInput { spec, original } = serde_json::from_reader(std::io::stdin().lock())
        .map_err(|error| refuse(format!("expected a job description in JSON: {error}")))?;
    let spec = match host::get().python {
        Some(python) => (python.settle)(&spec, &original).map_err(refuse)?,
        None => spec,
    };
    // The model reads the schema of the data, and the trial its first batch.
    let indexes = tempfile::tempdir()?;
    save_index(&spec, indexes.path());
    let mut model = crate::models::open(&spec, Some(indexes.path())).map_err(refuse)?;
    edl_worker::try_first_batches(&spec, &mut *model, indexes.path()).map_err(|misfit| {
        let name = &spec.model_def;
        let separator = if misfit.cause.contains('\n') { "\n" } else { " " };
        refuse(format!("model `{name}` {misfit}:{separator}{}", misfit.cause))
    })?;
    let described = Described { model: model.spec().clone(), spec };
    writeln!(out, "{}", serde_json::to_string(&described)?)?;
    Ok(Exit::Ok)
}

/// Indexes the data that the job goes through. Data that cannot be opened is reported by the model.
fn save_index(spec: &JobSpec, indexes: &Path) {
    let (_, location) = shipped::data_of(spec);
    let options = OpenOptions { codec: spec.codec_type, params: spec.data_reader_params.clone() };
    if let Ok(data) = Dataset::open(location, &options) {
        // Without it, the data is indexed again.
        let _ = data.save_index(indexes);
    }
}

/// Continues this command in an interpreter that replaces this process. The file of `--config` may
/// have been a pipe, so its text goes to the interpreter on standard input.
pub(crate) fn become_interpreter(spec: &JobSpec, file: Option<&str>) -> anyhow::Result<Exit> {
    let command = command();
    let mut interpreter = Command::new(&command[0]);
    interpreter.args(&command[1..]).args(std::env::args_os().skip(1)).envs(environment(spec));
    if let Some(text) = file {
        let mut copy = tempfile::tempfile()?;
        copy.write_all(text.as_bytes())?;
        copy.rewind()?;
        interpreter.arg("--config=-").stdin(copy);
    }
    let error = interpreter.exec();
    Err(refuse(format!(
        "cannot start `{}`: {error}; set {PYTHON} to an interpreter that has the elasticdl package",
        command[0].to_string_lossy()
    )))
}

/// Also exports the trained model in its framework's format. The job has succeeded even if this
/// fails.
pub(crate) fn export(job: &Job, spec: &JobSpec, forks: Option<&ForkServer>) {
    match export_to(&job.paths().output(spec), spec, forks) {
        Ok(names) => tracing::info!("also exported the model as {names}"),
        Err(error) => console::error(format_args!(
            "warning: the trained model is in {}, but could not be exported in its framework's \
             format: {error:#}",
            job.paths().output(spec).join("model.safetensors").display()
        )),
    }
}

/// Adds files in the framework's format to a folder with an exported model; returns their names.
pub(crate) fn export_to(
    folder: &Path,
    spec: &JobSpec,
    forks: Option<&ForkServer>,
) -> anyhow::Result<String> {
    let description = tempfile::NamedTempFile::new()?;
    std::fs::write(description.path(), serde_json::to_string(spec)?)?;
    let mut command = Command::new(&command()[0]);
    command
        .args(["-m", "elasticdl._export"])
        .arg(description.path())
        .arg(folder)
        .envs(environment(spec));
    let ran = fork_server::run(forks, command, &[], LIMIT)?;
    let ran = ran.context("it took longer than an hour")?;
    anyhow::ensure!(ran.how == Ended::Exit(0), "{}", ran.stderr.trim());
    Ok(ran.stdout.lines().next_back().unwrap_or_default().to_owned())
}

/// Environment of a process that computes in Python. Sums depend on the number of threads, so the
/// job sets it.
pub(crate) fn environment(spec: &JobSpec) -> Vec<(&'static str, String)> {
    let threads = spec.threads_per_worker.to_string();
    let mut all = vec![("PYTHONUNBUFFERED", "1".to_owned()), ("PYTHONHASHSEED", "0".to_owned())];
    for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"] {
        all.push((name, threads.clone()));
    }
    for name in ["TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"] {
        all.push((name, threads.clone()));
    }
    // TensorFlow prints a page of notes at every start.
    if std::env::var_os("TF_CPP_MIN_LOG_LEVEL").is_none() {
        all.push(("TF_CPP_MIN_LOG_LEVEL", "2".to_owned()));
    }
    all
}
