// SPDX-License-Identifier: Apache-2.0
//! An order for an image: with a tool where one answers, otherwise by ourselves.

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

/// A base image that is nothing.
const NOTHING: &str = "scratch";
/// How a base image on this machine's disk is named, as podman and buildah do.
const ARCHIVE: &str = "oci-archive:";
const LAYOUT: &str = "oci:";

/// Who builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builder {
    /// The first tool that answers, else ourselves.
    Any,
    Tool(Tool),
    Ourselves,
}

/// What is to be built.
#[derive(Clone, Debug)]
pub struct Order {
    pub image: Reference,
    pub context: PathBuf,
    pub dockerfile: PathBuf,
    /// Values for the ARG lines of the Dockerfile.
    pub args: BTreeMap<String, String>,
    pub builder: Builder,
    /// The command that goes into the image, if the Dockerfile asks for it.
    pub program: Option<PathBuf>,
    /// A file to write the image to.
    pub output: Option<PathBuf>,
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The tool that has it; none: it is in our store.
    pub tool: Option<Tool>,
    pub digest: Option<crate::digest::Digest>,
    pub n_layers: usize,
    /// Compressed, as it is sent.
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

impl Order {
    /// Builds the image; it is in the tool that built it, or in the store at `images`.
    pub fn build(&self, images: &Path) -> Result<Built, Error> {
        let file = self.read_dockerfile()?;
        let program = self.program(&file)?;
        // Checks that there is such a folder, whoever builds.
        let context = Context::open(&self.context, program)?;
        let tool = match self.builder {
            Builder::Ourselves => None,
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
        // From now on the name means the tool's image.
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

    /// The files of the command, where the Dockerfile copies them.
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

/// Sends an image to its registry: ours, or that of the tool which has it. The answer is what was
/// sent, if we did it.
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

/// Finds the image to start from: on this disk, among our own, or at its registry.
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

/// The command on the disk of the context, as long as a tool reads it there.
#[derive(Debug)]
struct Staged(Option<PathBuf>);

impl Staged {
    fn write(context: &Path, entries: &[Entry]) -> Result<Self, Error> {
        if entries.is_empty() {
            return Ok(Self(None));
        }
        let root = context.join(PROGRAM);
        let staged = Self(Some(root.clone()));
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
            // The next build writes it anew, so what is left does no harm.
            let _left = fs::remove_dir_all(root);
        }
    }
}
