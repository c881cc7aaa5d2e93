// SPDX-License-Identifier: Apache-2.0
//! `zoo`: images of models, for clusters.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use edl_image::build::{self, BuildRequest, Built};
use edl_image::reference::Reference;
use edl_image::registry;
use edl_image::skeleton::{self, Skeleton};
use edl_image::tool::Tool;

use crate::cli::zoo::{
    Builder, Language, ZooArgs, ZooBuildArgs, ZooCommand, ZooInitArgs, ZooPushArgs,
};
use crate::console::{counted, eprint};
use crate::exit::{Exit, refuse};
use crate::host;
use crate::jobs::Home;

/// The argument of every Dockerfile of ours that names the image to start from.
const BASE_IMAGE: &str = "BASE_IMAGE";

pub(crate) fn run(args: &ZooArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match &args.command {
        ZooCommand::Init(args) => init(args, out),
        ZooCommand::Build(args) => build(args, out),
        ZooCommand::Push(args) => push(args, out),
    }
}

/// Builds an image of a folder of models, pushes it to the registry of `prefix`, and returns the
/// image name for the job. The name contains the digest, if it is known, so all pods of the job run
/// the same image.
pub(crate) fn publish(
    model_zoo: &Path,
    base_image: &str,
    prefix: &str,
    job_name: &str,
) -> anyhow::Result<String> {
    let image = parse(&format!("{}/elasticdl-{job_name}", prefix.trim_end_matches('/')))?;
    let skeleton = Skeleton::for_models(model_zoo, base_image);
    let text = skeleton.dockerfile(model_zoo).map_err(|error| refused(&error))?;
    let folder = tempfile::tempdir()?;
    let dockerfile = folder.path().join("Dockerfile");
    std::fs::write(&dockerfile, text)?;
    let request = BuildRequest {
        image: image.clone(),
        context: model_zoo.into(),
        dockerfile,
        args: BTreeMap::new(),
        builder: build::Builder::Any,
        program: program(),
        output: None,
    };
    eprint(format_args!("building {image}"));
    request.build(&images()?).map_err(explained)?;
    eprint(format_args!("pushing {image}"));
    let pushed = build::push(&images()?, &image).map_err(explained)?;
    Ok(pushed.map_or_else(|| image.short(), |pushed| format!("{image}@{}", pushed.digest)))
}

fn init(args: &ZooInitArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let skeleton = Skeleton {
        language: match args.language {
            Language::Python => skeleton::Language::Python,
            Language::Rust => skeleton::Language::Rust,
        },
        base_image: args.base_image.clone(),
        model_zoo: args.model_zoo.clone(),
        local_pkg_dir: args.local_pkg_dir.clone(),
        cluster_spec: args.cluster_spec.clone(),
        extra_pypi_index: args.extra_pypi_index.clone(),
    };
    let written = skeleton.write(Path::new("."), args.force).map_err(|error| refused(&error))?;
    for path in written {
        writeln!(out, "{}", path.strip_prefix(".").unwrap_or(&path).display())?;
    }
    eprint("edit the files, then run `elasticdl zoo build --image=NAME:TAG`");
    Ok(Exit::Ok)
}

fn build(args: &ZooBuildArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let request = BuildRequest {
        image: parse(&args.image)?,
        context: args.folder.clone(),
        dockerfile: dockerfile(&args.folder),
        args: args.base_image.iter().map(|base| (BASE_IMAGE.into(), base.clone())).collect(),
        builder: match args.builder {
            None => build::Builder::Any,
            Some(Builder::Docker) => build::Builder::Tool(Tool::Docker),
            Some(Builder::Podman) => build::Builder::Tool(Tool::Podman),
            Some(Builder::Buildah) => build::Builder::Tool(Tool::Buildah),
            Some(Builder::Own) => build::Builder::BuiltIn,
        },
        program: args.binary.clone().or_else(program),
        output: args.output.clone(),
    };
    let built = request.build(&images()?).map_err(explained)?;
    print_built(&request, &built, out)?;
    Ok(Exit::Ok)
}

fn print_built(request: &BuildRequest, built: &Built, out: &mut dyn Write) -> anyhow::Result<()> {
    let image = &request.image;
    match (&built.digest, built.tool) {
        (Some(digest), _) => writeln!(out, "{image}@{digest}")?,
        (None, _) => writeln!(out, "{image}")?,
    }
    match built.tool {
        Some(tool) => eprint(format_args!("built with {}", tool.program())),
        None => eprint(format_args!(
            "built without a daemon: {:.1} MB in {} layers",
            megabytes(built.n_bytes),
            built.n_layers
        )),
    }
    match &request.output {
        Some(file) => eprint(format_args!("written to {}", file.display())),
        None => eprint(format_args!("next: run `elasticdl zoo push {image}`")),
    }
    Ok(())
}

fn push(args: &ZooPushArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let image = parse(&args.image)?;
    match build::push(&images()?, &image).map_err(explained)? {
        Some(pushed) => {
            writeln!(out, "{}@{}", image.short(), pushed.digest)?;
            eprint(format_args!(
                "pushed {}, {:.1} MB; {} already existed",
                counted(pushed.n_sent as u64, "blob"),
                megabytes(pushed.n_bytes),
                pushed.n_there
            ));
        }
        None => writeln!(out, "{image}")?,
    }
    Ok(Exit::Ok)
}

/// Images that were built without a tool: `$ELASTICDL_HOME/images`.
fn images() -> anyhow::Result<PathBuf> {
    Ok(Home::from_env()?.images_dir())
}

/// This program, unless it is a Python interpreter.
fn program() -> Option<PathBuf> {
    if host::get().python.is_some() { None } else { std::env::current_exe().ok() }
}

/// The Dockerfile of the folder, or else of the current folder.
fn dockerfile(folder: &Path) -> PathBuf {
    let here = PathBuf::from("Dockerfile");
    let inside = folder.join("Dockerfile");
    if !inside.exists() && here.exists() { here } else { inside }
}

fn parse(image: &str) -> anyhow::Result<Reference> {
    Reference::parse(image).map_err(|error| refused(&error))
}

/// Failures of registries and disks are failures of the command; all others are bad input.
fn explained(error: build::Error) -> anyhow::Error {
    use build::Error as E;
    use registry::Error as R;
    let is_login = matches!(&error, E::Registry(R::Unauthorized(_) | R::Denied { .. }));
    let is_outside = matches!(&error, E::Registry(_) | E::Store(_) | E::Write(..) | E::Tool(_));
    if is_outside && !is_login { error.into() } else { refused(&error) }
}

/// A sentence with its causes.
fn refused(error: &(dyn std::error::Error + 'static)) -> anyhow::Error {
    refuse(edl_core::error::chain(error))
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn megabytes(n_bytes: u64) -> f64 {
    n_bytes as f64 / 1e6
}
