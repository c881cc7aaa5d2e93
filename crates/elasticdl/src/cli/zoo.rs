// SPDX-License-Identifier: Apache-2.0
//! The flags of `zoo`: images of models.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

const EXAMPLES: &str = "\
Examples:
  elasticdl zoo init --model_zoo=model_zoo && elasticdl zoo build --image=elasticdl:mnist
  elasticdl zoo init --language=rust && elasticdl zoo build --image=localhost:5000/elasticdl:mnist
  elasticdl zoo build --image=elasticdl:mnist --output=mnist.tar     for `docker load`, `ctr images import`
  elasticdl zoo push localhost:5000/elasticdl:mnist";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ZooArgs {
    #[command(subcommand)]
    pub(crate) command: ZooCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ZooCommand {
    /// Write a Dockerfile, and a first model where there is none
    Init(ZooInitArgs),
    /// Build the image, with docker, podman or buildah where one answers, and without them elsewhere
    Build(ZooBuildArgs),
    /// Send an image to its registry
    Push(ZooPushArgs),
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ZooInitArgs {
    /// What the models are: python, or rust for those that are built in and need no Python
    #[arg(long, value_name = "NAME", default_value = "python")]
    pub(crate) language: Language,
    /// Image to start from [default: python:3.12-slim, or scratch for rust]
    #[arg(long, value_name = "IMAGE", default_value = "", hide_default_value = true)]
    pub(crate) base_image: String,
    /// Folder of models, in this folder
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) model_zoo: PathBuf,
    /// Install the wheels of this folder, and not those of the package index
    #[arg(long, value_name = "DIR")]
    pub(crate) local_pkg_dir: Option<PathBuf>,
    /// File that changes pods for a site; it goes to /cluster_spec in the image
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_spec: Option<PathBuf>,
    /// Another package index to ask
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true)]
    pub(crate) extra_pypi_index: String,
    /// Replace the Dockerfile if there is one
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Language {
    Python,
    Rust,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ZooBuildArgs {
    /// Folder with the Dockerfile
    #[arg(value_name = "DIR", default_value = ".")]
    pub(crate) folder: PathBuf,
    /// Name of the image, e.g. elasticdl:mnist or HOST:PORT/NAME:TAG
    #[arg(long, value_name = "NAME:TAG")]
    pub(crate) image: String,
    /// Image to start from, instead of the Dockerfile's; also oci-archive:FILE and oci:DIR
    #[arg(long, value_name = "IMAGE")]
    pub(crate) base_image: Option<String>,
    /// Who builds: docker, podman, buildah or own [default: the first that answers]
    #[arg(long, value_name = "NAME")]
    pub(crate) builder: Option<Builder>,
    /// Write the image to a file, too
    #[arg(long, value_name = "FILE.tar")]
    pub(crate) output: Option<PathBuf>,
    /// The elasticdl program that goes into the image [default: this one]
    #[arg(long, value_name = "FILE")]
    pub(crate) binary: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Builder {
    Docker,
    Podman,
    Buildah,
    Own,
}

#[derive(Args, Debug)]
pub(crate) struct ZooPushArgs {
    /// Name of the image
    #[arg(value_name = "IMAGE")]
    pub(crate) image: String,
}
