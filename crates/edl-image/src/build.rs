// SPDX-License-Identifier: Apache-2.0
//! Builds and pushes an image: with a container tool if one is available, otherwise by itself.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::archive;
use crate::context::{self, Context, PROGRAM};
use crate::dockerfile::{self, Dockerfile, Step};
use crate::image::Descriptor;
use crate::layer::{Content, Entry};
use crate::program::{self, Program};
use crate::recipe;
use crate::reference::{self, Reference};
use crate::registry::{self, Registry};
use crate::store::{self, Image, Store};
use crate::tool::{self, Tool};

/// The empty base image.
const NOTHING: &str = "scratch";
/// Prefixes of base images on disk, as podman and buildah name them.
const ARCHIVE: &str = "oci-archive:";
const LAYOUT: &str = "oci:";

/// What builds the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builder {
    /// The first available tool, or else the built-in builder.
    Any,
    Tool(Tool),
    BuiltIn,
}

/// An image to build.
#[derive(Clone, Debug)]
pub struct BuildRequest {
    pub image: Reference,
    pub context: PathBuf,
    pub dockerfile: PathBuf,
    /// Values for the ARG lines of the Dockerfile.
    pub args: BTreeMap<String, String>,
    pub builder: Builder,
    /// The `elasticdl` program, in case the Dockerfile copies it.
    pub program: Option<PathBuf>,
    /// A file to write the image to.
    pub output: Option<PathBuf>,
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The tool that has it; none if it is in the store.
    pub tool: Option<Tool>,
    pub digest: Option<crate::digest::Digest>,
    pub n_layers: usize,
    /// Compressed.
    pub n_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{0}` not found; create it with `elasticdl zoo init`")]
    NoDockerfile(PathBuf),
    #[error("cannot read `{0}`")]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot write `{0}`")]
    Write(PathBuf, #[source] io::Error),
    #[error(
        "the command of the Python package cannot run without Python; specify a standalone program with --binary=FILE"
    )]
    NoProgram,
    #[error("image `{0}` not found here; build it with `elasticdl zoo build --image={0}`")]
    NoImage(String),
    #[error(transparent)]
    Reference(#[from] reference::Error),
    #[error(transparent)]
    Dockerfile(#[from] dockerfile::Error),
    #[error(transparent)]
    Context(#[from] context::Error),
    #[error(transparent)]
    Program(#[from] program::Error),
    #[error(transparent)]
    Tool(#[from] tool::Error),
    #[error(transparent)]
    Recipe(#[from] recipe::Error),
    #[error(transparent)]
    Archive(#[from] archive::Error),
    #[error(transparent)]
    Registry(#[from] registry::Error),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl BuildRequest {
    /// Builds the image; it is in the tool that built it, or in the store at `images`.
    pub fn build(&self, images: &Path) -> Result<Built, Error> {
        let file = self.read_dockerfile()?;
        let program = self.program(&file)?;
        // Checks the folder for every builder.
        let context = Context::open(&self.context, program)?;
        let tool = match self.builder {
            Builder::BuiltIn => None,
            Builder::Any => Tool::find()?,
            Builder::Tool(tool) => tool.check().map(|()| Some(tool))?,
        };
        match tool {
            Some(tool) => self.build_by(tool, &context, images),
            None => self.build_here(&file, &context, images),
        }
    }

    fn build_here(
        &self,
        file: &Dockerfile,
        context: &Context,
        images: &Path,
    ) -> Result<Built, Error> {
        if let Some(needed) = file.needs_tool() {
            return Err(recipe::Error::Run(needed.clone()).into());
        }
        let store = Store::open(images)?;
        let base = base(&store, &file.base)?;
        let descriptor = recipe::build(&store, base.as_ref(), file, context)?;
        store.name(&self.image, &descriptor)?;
        if let Some(out) = &self.output {
            archive::write(&store, &self.image, &descriptor, out)?;
        }
        let image = store.image(&descriptor)?;
        let layers = &image.manifest.layers;
        Ok(Built {
            tool: None,
            digest: Some(descriptor.digest),
            n_layers: layers.len(),
            n_bytes: layers.iter().map(|layer| layer.size).sum(),
        })
    }

    fn build_by(&self, tool: Tool, context: &Context, images: &Path) -> Result<Built, Error> {
        let name = self.image.short();
        let staged = Staged::write(&self.context, context.program())?;
        tool.build(&self.context, &self.dockerfile, &name, &self.args)?;
        drop(staged);
        if let Some(out) = &self.output {
            tool.save(&name, out)?;
        }
        // From now on, the name refers to the tool's image.
        Store::open(images)?.forget(&self.image)?;
        Ok(Built { tool: Some(tool), digest: None, n_layers: 0, n_bytes: 0 })
    }

    fn read_dockerfile(&self) -> Result<Dockerfile, Error> {
        let path = &self.dockerfile;
        if !self.context.is_dir() {
            return Err(context::Error::NoFolder(self.context.clone()).into());
        }
        let text = fs::read_to_string(path).map_err(|error| {
            if error.kind() == io::ErrorKind::NotFound {
                Error::NoDockerfile(path.clone())
            } else {
                Error::Read(path.clone(), error)
            }
        })?;
        Ok(dockerfile::parse(&text, &self.args)?)
    }

    /// The files of the program, if the Dockerfile copies them.
    fn program(&self, file: &Dockerfile) -> Result<Vec<Entry>, Error> {
        let is_program = |source: &String| source.trim_end_matches('/') == PROGRAM;
        let copies = |step: &Step| matches!(step, Step::Copy { sources, .. } if sources.iter().any(is_program));
        if !file.steps.iter().any(copies) {
            return Ok(Vec::new());
        }
        let program = Program::read(self.program.as_ref().ok_or(Error::NoProgram)?)?;
        Ok(if file.base == NOTHING { program.with_all() } else { program.alone() })
    }
}

/// Pushes an image from the store, or with the tool that has it. Returns what was sent from the
/// store.
pub fn push(images: &Path, image: &Reference) -> Result<Option<registry::Pushed>, Error> {
    let store = Store::open(images)?;
    if let Some(descriptor) = store.find(image)? {
        return Ok(Some(Registry::open(image)?.push(&store, &descriptor)?));
    }
    let name = image.short();
    let tool = tool::ALL.into_iter().find(|tool| tool.check().is_ok() && tool.has(&name));
    tool.ok_or_else(|| Error::NoImage(name.clone()))?.push(&name)?;
    Ok(None)
}

/// Finds the base image: on disk, in the store, or at its registry.
fn base(store: &Store, name: &str) -> Result<Option<Image>, Error> {
    let descriptor: Descriptor = if name == NOTHING {
        return Ok(None);
    } else if let Some(file) = name.strip_prefix(ARCHIVE) {
        archive::read(store, Path::new(file))?
    } else if let Some(folder) = name.strip_prefix(LAYOUT) {
        archive::read_folder(store, Path::new(folder))?
    } else {
        let reference = Reference::parse(name)?;
        match store.find(&reference)? {
            Some(found) => found,
            None => Registry::open(&reference)?.pull(store)?,
        }
    };
    Ok(Some(store.image(&descriptor)?))
}

/// The program in the folder of the context, while a tool reads it there.
#[derive(Debug)]
struct Staged(Option<PathBuf>);

impl Staged {
    fn write(context: &Path, entries: &[Entry]) -> Result<Self, Error> {
        if entries.is_empty() {
            return Ok(Self(None));
        }
        let root = context.join(PROGRAM);
        let staged = Self(Some(root.clone()));
        // An existing one is a leftover of another build, or a trap: a link would be followed.
        match fs::remove_dir_all(&root) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::Write(root, error));
            }
            Ok(()) | Err(_) => {}
        }
        for entry in entries {
            let path = root.join(&entry.path);
            let error = |error| Error::Write(path.clone(), error);
            fs::create_dir_all(path.parent().unwrap_or(&root)).map_err(error)?;
            match &entry.content {
                Content::Folder => fs::create_dir_all(&path).map_err(error)?,
                Content::Bytes(bytes) => fs::write(&path, bytes).map_err(error)?,
                Content::Link(_) | Content::File(_) => continue,
            }
            fs::set_permissions(&path, PermissionsExt::from_mode(entry.mode)).map_err(error)?;
        }
        Ok(staged)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(root) = &self.0 {
            // The next build removes what is left.
            let _left = fs::remove_dir_all(root);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_staged_program_is_never_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (context, outside) = (dir.path().join("context"), dir.path().join("outside"));
        fs::create_dir(&context).unwrap();
        fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, context.join(PROGRAM)).unwrap();
        let staged = Staged::write(&context, &[Entry::bytes("bin/x", 0o755, "x")]).unwrap();
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        assert_eq!(fs::read(context.join(PROGRAM).join("bin/x")).unwrap(), b"x");
        drop(staged);
        assert!(!context.join(PROGRAM).exists() && outside.exists());
    }
}
