// SPDX-License-Identifier: Apache-2.0
//! The flags of `zoo`: images of models.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

const EXAMPLES: &str = "\
Examples:
  elasticdl zoo init --model_zoo=model_zoo && elasticdl zoo build --image=elasticdl:mnist
  elasticdl zoo init --language=rust && elasticdl zoo build --image=localhost:5000/elasticdl:mnist
  elasticdl zoo build --image=elasticdl:mnist --output=mnist.tar     for `docker load`
  elasticdl zoo push localhost:5000/elasticdl:mnist";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ZooArgs {
    #[command(subcommand)]
    pub(crate) command: ZooCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ZooCommand {
    /// Write a Dockerfile, and an example model if there is none
    Init(ZooInitArgs),
    /// Build the image with docker, podman or buildah, or with the built-in builder if none is
    /// available
    Build(ZooBuildArgs),
    /// Push an image to its registry
    Push(ZooPushArgs),
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ZooInitArgs {
    /// Language of the models: python, or rust for the built-in models, which need no Python
    #[arg(long, value_name = "NAME", default_value = "python")]
    pub(crate) language: Language,
    /// Base image [default: python:3.12-slim, or scratch for rust]
    #[arg(long, value_name = "IMAGE", default_value = "", hide_default_value = true)]
    pub(crate) base_image: String,
    /// Folder with the models, inside the current folder
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) model_zoo: PathBuf,
    /// Install wheels from this folder instead of the package index
    #[arg(long, value_name = "DIR")]
    pub(crate) local_pkg_dir: Option<PathBuf>,
    /// File with patches for pods on your cluster, copied to /cluster_spec in the image
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_spec: Option<PathBuf>,
    /// Additional package index
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true)]
    pub(crate) extra_pypi_index: String,
    /// Overwrite an existing Dockerfile
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
    /// Image name, e.g. elasticdl:mnist or HOST:PORT/NAME:TAG
    #[arg(long, value_name = "NAME:TAG")]
    pub(crate) image: String,
    /// Base image; also oci-archive:FILE or oci:DIR [default: the Dockerfile's]
    #[arg(long, value_name = "IMAGE")]
    pub(crate) base_image: Option<String>,
    /// Build tool: docker, podman, buildah or own (built in) [default: the first one available]
    #[arg(long, value_name = "NAME")]
    pub(crate) builder: Option<Builder>,
    /// Also write the image to a file
    #[arg(long, value_name = "FILE.tar")]
    pub(crate) output: Option<PathBuf>,
    /// elasticdl binary to put into the image [default: the one that runs this command]
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
    /// Image name
    #[arg(value_name = "IMAGE")]
    pub(crate) image: String,
}
