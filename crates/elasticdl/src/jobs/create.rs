// SPDX-License-Identifier: Apache-2.0
//! Creating and removing job folders: a folder appears complete or not at all, and only its owner can
//! read it.

use std::fmt::Display;
use std::fs::{self, DirBuilder};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use edl_core::job_dir::JobDir;
use edl_core::spec::JobSpec;
use edl_net::key::JobKey;
use serde::Serialize;
use tempfile::TempDir;

use super::{Home, Job};
use crate::exit::refuse;

/// How the names of folders begin that are not the folder of a job yet.
const DRAFT: &str = ".new-";
/// No command needs a draft for so long.
const OLD_DRAFT: Duration = Duration::from_secs(24 * 3600);

impl Home {
    /// Creates the folder of a new job, with a new key. If it is `dir`, a link leads to it.
    pub(crate) fn create(&self, spec: &JobSpec, dir: Option<&Path>) -> anyhow::Result<Job> {
        let link = self.jobs_dir().join(&spec.job_name);
        let place = self.place(&spec.job_name, dir)?;
        self.check_free(&spec.job_name, &place)?;
        let parent = self.parent(&place)?;
        let unwritable = |error: &dyn Display| unwritable(&place, error);
        let draft = parent.join(format!("{DRAFT}{}-{}", spec.job_name, suffix()?));
        let made = fill(&draft, spec).and_then(|()| {
            fs::rename(&draft, &place)
                .with_context(|| format!("`{}` already exists", place.display()))
        });
        if let Err(error) = made {
            let _draft_stays_hidden = fs::remove_dir_all(&draft);
            return Err(unwritable(&format_args!("{error:#}")));
        }
        if place != link {
            symlink(&place, &link).with_context(|| format!("cannot write `{}`", link.display()))?;
        }
        Job::open(&place).with_context(|| format!("`{}` no longer exists", place.display()))
    }

    /// Where the folder of a job with this name is; `dir` is what the user has chosen.
    pub(crate) fn place(&self, name: &str, dir: Option<&Path>) -> anyhow::Result<PathBuf> {
        match dir {
            Some(dir) => std::path::absolute(dir).context("cannot resolve --job_dir"),
            None => Ok(self.jobs_dir().join(name)),
        }
    }

    /// A hidden folder beside that of a job, for files that become part of it.
    pub(crate) fn draft(&self, name: &str, place: &Path) -> anyhow::Result<TempDir> {
        self.remove_old_drafts();
        let prefix = format!("{DRAFT}{name}-");
        let made = tempfile::Builder::new().prefix(&prefix).tempdir_in(self.parent(place)?);
        made.map_err(|error| unwritable(place, &error))
    }

    /// Removes what commands have left that were killed.
    fn remove_old_drafts(&self) {
        for entry in fs::read_dir(self.jobs_dir()).into_iter().flatten().flatten() {
            let is_draft = entry.file_name().to_string_lossy().starts_with(DRAFT);
            let changed = entry.metadata().and_then(|metadata| metadata.modified());
            let age = changed.ok().and_then(|changed| changed.elapsed().ok());
            if is_draft && age.is_some_and(|age| age > OLD_DRAFT) {
                let _retried_next_time = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// The folder that the folder of a job is in.
    fn parent<'a>(&self, place: &'a Path) -> anyhow::Result<&'a Path> {
        let parent = place.parent().unwrap_or(Path::new("/"));
        for needed in [parent, &self.jobs_dir()] {
            private_dir(needed, true).map_err(|error| unwritable(place, &error))?;
        }
        Ok(parent)
    }

    /// Refuses a name or a folder of another job.
    pub(crate) fn check_free(&self, name: &str, place: &Path) -> anyhow::Result<()> {
        let link = self.jobs_dir().join(name);
        if let Some(job) = Job::open(&link).or_else(|| Job::open(place)) {
            let name = job.name().unwrap_or_else(|| name.to_owned());
            return Err(refuse(if job.is_running() {
                format!(
                    "job name `{name}` is in use by a running job; watch it with \
                     `elasticdl attach {name}`, or choose another --job_name"
                )
            } else {
                format!(
                    "job name `{name}` is in use by a finished job ({}); resume it with \
                     `--resume {name}`, choose another --job_name, or remove it with \
                     `elasticdl clean {name}`",
                    job.state()
                )
            }));
        }
        if link.is_symlink() && !link.exists() {
            // Its folder was removed manually.
            fs::remove_file(&link)
                .with_context(|| format!("cannot remove `{}`", link.display()))?;
        }
        match fs::read_dir(place).map(|mut entries| entries.next().is_some()) {
            Ok(true) => Err(refuse(format!(
                "`{}` is not empty and contains no job; choose another --job_dir",
                place.display()
            ))),
            Err(error) if error.kind() == ErrorKind::NotADirectory => Err(refuse(format!(
                "`{}` is not a folder; choose another with --job_dir or ELASTICDL_HOME",
                place.display()
            ))),
            Ok(false) | Err(_) => Ok(()),
        }
    }

    /// Removes a job that is not running, with everything in its folder.
    pub(crate) fn remove(&self, job: &Job) -> anyhow::Result<()> {
        let (name, handle) = (job.name(), job.handle());
        let shown = job.dir().display();
        // Held while it is removed, so it cannot be resumed meanwhile.
        let hold = job.hold().with_context(|| format!("cannot lock `{shown}`"))?;
        if hold.is_none() {
            return Err(still_running(&handle, &handle));
        }
        fs::remove_dir_all(job.dir()).with_context(|| format!("cannot remove `{shown}`"))?;
        let link = self.jobs_dir().join(name.unwrap_or_default());
        if link.is_symlink() && !link.exists() {
            fs::remove_file(&link)
                .with_context(|| format!("cannot remove `{}`", link.display()))?;
        }
        Ok(())
    }
}

impl Job {
    /// The job in a folder that all its pods see; created if it does not exist. The description in
    /// it is updated from the ConfigMap.
    pub(crate) fn in_folder(dir: &Path, spec: &JobSpec) -> anyhow::Result<Self> {
        let unusable = |error: &dyn Display| {
            refuse(format!(
                "cannot use the job folder `{}`: {error}; use a --volume that the job can write to",
                dir.display()
            ))
        };
        let paths = JobDir::new(dir);
        private_dir(&paths.logs(), true).map_err(|error| unusable(&error))?;
        let written = write_json(&paths.spec(), spec);
        written.map_err(|error| unusable(&format_args!("{error:#}")))?;
        Self::open(dir).with_context(|| format!("`{}` no longer exists", dir.display()))
    }
}

fn unwritable(place: &Path, error: &dyn Display) -> anyhow::Error {
    refuse(format!(
        "cannot create the job folder `{}`: {error}; choose another with --job_dir or \
         ELASTICDL_HOME",
        place.display()
    ))
}

fn fill(draft: &Path, spec: &JobSpec) -> anyhow::Result<()> {
    let paths = JobDir::new(draft);
    private_dir(draft, false)?;
    private_dir(&paths.logs(), false)?;
    JobKey::generate()?.save(&paths.key())?;
    write_json(&paths.spec(), spec)
}

/// Writes a temporary file and renames it, so readers see a complete file.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let draft = path.with_file_name(format!(".{name}.new"));
    let write = || -> std::io::Result<()> {
        let mut text = serde_json::to_vec_pretty(value)?;
        text.push(b'\n');
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&draft, path)
    };
    write().with_context(|| format!("cannot write `{}`", path.display()))
}

fn private_dir(path: &Path, recursive: bool) -> std::io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(recursive).create(path)
}

/// The refusal to remove a running job; `handle` is what commands find it by.
pub(crate) fn still_running(name: &str, handle: &str) -> anyhow::Error {
    refuse(format!("job `{name}` is running; stop it first with `elasticdl stop {handle}`"))
}

/// Four digits that make a name unique.
pub(crate) fn suffix() -> anyhow::Result<String> {
    let mut bytes = [0; 2];
    getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("no random numbers: {error}"))?;
    Ok(format!("{:04x}", u16::from_le_bytes(bytes)))
}
