// SPDX-License-Identifier: Apache-2.0
//! Tools that can run containers: docker, podman and buildah, if they are available.
//!
//! They find their daemons as usual; docker reads `DOCKER_HOST`, `DOCKER_TLS_VERIFY` and
//! `DOCKER_CERT_PATH`.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// In the order in which they are tried.
pub const ALL: [Tool; 3] = [Tool::Docker, Tool::Podman, Tool::Buildah];
const DOCKER_HOST: &str = "DOCKER_HOST";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    Docker,
    Podman,
    Buildah,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "docker at DOCKER_HOST `{host}` is not responding ({why}); start it, or unset DOCKER_HOST to build without it"
    )]
    DockerHost { host: String, why: String },
    #[error("`{0}` is not available ({1}); start it, or omit --builder")]
    Silent(&'static str, String),
    #[error("cannot start `{0}`")]
    Start(&'static str, #[source] io::Error),
    #[error("`{program} {verb}` failed; see its output above")]
    Failed { program: &'static str, verb: String },
}

impl Tool {
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
            Self::Buildah => "buildah",
        }
    }

    /// The first available tool. It is an error if `DOCKER_HOST` is set but does not respond,
    /// because then the user wants the image there.
    pub fn find() -> Result<Option<Self>, Error> {
        if let Ok(host) = std::env::var(DOCKER_HOST)
            && let Err(error) = Self::Docker.check()
        {
            let why = if let Error::Silent(_, why) = error { why } else { error.to_string() };
            return Err(Error::DockerHost { host, why });
        }
        Ok(ALL.into_iter().find(|tool| tool.check().is_ok()))
    }

    /// Whether it is available; for docker, whether its daemon responds.
    pub fn check(self) -> Result<(), Error> {
        let args: &[&str] = match self {
            Self::Docker => &["version", "--format", "{{.Server.Version}}"],
            Self::Podman => &["info", "--format", "{{.Version.Version}}"],
            Self::Buildah => &["info"],
        };
        let silent = |why: String| Error::Silent(self.program(), why);
        let output = self.command(args).stdin(Stdio::null()).output();
        let output = output.map_err(|error| silent(error.to_string()))?;
        if output.status.success() { Ok(()) } else { Err(silent(last_line(&output))) }
    }

    /// Builds an image from a folder; the tool's output goes to standard error.
    pub fn build(
        self,
        context: &Path,
        file: &Path,
        image: &str,
        args: &BTreeMap<String, String>,
    ) -> Result<(), Error> {
        let mut command = self.command(&["build", "--tag", image, "--file"]);
        command.arg(file);
        for (name, value) in args {
            command.arg("--build-arg").arg(format!("{name}={value}"));
        }
        self.run(command.arg(context))
    }

    /// Whether it has an image of this name.
    #[must_use]
    pub fn has(self, image: &str) -> bool {
        let args: &[&str] = match self {
            Self::Docker | Self::Podman => &["image", "inspect", image],
            Self::Buildah => &["inspect", "--type", "image", image],
        };
        let output = self.command(args).stdin(Stdio::null()).output();
        output.is_ok_and(|output| output.status.success())
    }

    /// Writes an image to a file that the other tools and `ctr images import` can read.
    pub fn save(self, image: &str, out: &Path) -> Result<(), Error> {
        match self {
            Self::Docker => self.run(self.command(&["save", "--output"]).arg(out).arg(image)),
            Self::Podman => {
                let mut command = self.command(&["save", "--format", "oci-archive", "--output"]);
                self.run(command.arg(out).arg(image))
            }
            Self::Buildah => {
                let target = format!("oci-archive:{}:{image}", out.display());
                self.run(&mut self.command(&["push", image, &target]))
            }
        }
    }

    pub fn push(self, image: &str) -> Result<(), Error> {
        self.run(&mut self.command(&["push", image]))
    }

    fn command(self, args: &[impl AsRef<OsStr>]) -> Command {
        let mut command = Command::new(self.program());
        command.args(args);
        command
    }

    fn run(self, command: &mut Command) -> Result<(), Error> {
        let verb = command.get_args().next().unwrap_or_default().to_string_lossy().into_owned();
        // Standard output is for our own results.
        let status = command.stdin(Stdio::null()).stdout(io::stderr()).status();
        let status = status.map_err(|error| Error::Start(self.program(), error))?;
        if status.success() { Ok(()) } else { Err(Error::Failed { program: self.program(), verb }) }
    }
}

fn last_line(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no reason given").trim().into()
}
