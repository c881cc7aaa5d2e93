// SPDX-License-Identifier: Apache-2.0
//! Executes a Dockerfile without a daemon: every COPY adds a layer to the base image.

use serde_json::json;

use crate::base::{self, Paths};
use crate::context::{self, Context};
use crate::dockerfile::{Dockerfile, Needed, Step};
use crate::image::{self, Config, Descriptor, Runtime};
use crate::layer;
use crate::store::{self, Image, Store};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "line {line} of the Dockerfile, `{text}`, requires docker, podman or buildah, but none is available; start one, or use a base image that already contains its result and delete the line",
        line = .0.line, text = .0.text
    )]
    Run(Needed),
    #[error(transparent)]
    Context(#[from] context::Error),
    #[error(transparent)]
    Base(#[from] base::Error),
    #[error(transparent)]
    Layer(#[from] layer::Error),
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Builds the image into the store; it has no name there yet.
pub fn build(
    store: &Store,
    base: Option<&Image>,
    file: &Dockerfile,
    context: &Context,
) -> Result<Descriptor, Error> {
    if let Some(needed) = file.needs_tool() {
        return Err(Error::Run(needed.clone()));
    }
    let (mut config, mut layers) = match base {
        Some(base) => (base.config.clone(), base.manifest.layers.clone()),
        None => (Config::empty(), Vec::new()),
    };
    let below = match base {
        Some(base) => Paths::of(store, &base.manifest)?,
        None => Paths::default(),
    };
    config.other.insert("created".into(), image::EPOCH.into());
    for step in &file.steps {
        let line = if let Step::Copy { sources, target } = step {
            let mut entries = Vec::new();
            for source in sources {
                entries.extend(context.copy(source, &absolute(&config.config, target))?);
            }
            let layer = layer::write(store, &below, entries)?;
            config.rootfs.diff_ids.push(layer.diff_id);
            layers.push(layer.blob);
            format!("COPY {} {target}", sources.join(" "))
        } else {
            apply(&mut config, step)
        };
        let is_empty = !matches!(step, Step::Copy { .. });
        config
            .history
            .push(json!({"created": image::EPOCH, "created_by": line, "empty_layer": is_empty}));
    }
    let config = store.put_json(image::CONFIG, &config)?;
    Ok(store.put_manifest(config, layers)?)
}

/// Changes how the container is started. Returns the line for the image's history.
fn apply(config: &mut Config, step: &Step) -> String {
    let runtime = &mut config.config;
    match step {
        Step::Env(pairs) => {
            for (name, value) in pairs {
                runtime.env.retain(|each| each.split_once('=').is_none_or(|(old, _)| old != name));
                runtime.env.push(format!("{name}={value}"));
            }
        }
        Step::Label(pairs) => runtime.labels.extend(pairs.iter().cloned()),
        Step::User(user) => runtime.user.clone_from(user),
        Step::WorkingDir(path) => runtime.working_dir = absolute(runtime, path),
        Step::Entrypoint(command) => {
            runtime.entrypoint.clone_from(command);
            // The base image's arguments were for its own entry point.
            runtime.cmd.clear();
        }
        Step::Cmd(command) => runtime.cmd.clone_from(command),
        Step::Expose(ports) => {
            let full = |port: &String| {
                if port.contains('/') { port.clone() } else { format!("{port}/tcp") }
            };
            runtime.exposed_ports.extend(ports.iter().map(|port| (full(port), json!({}))));
        }
        Step::Copy { .. } | Step::Run(_) => {}
    }
    format!("{step:?}")
}

fn absolute(runtime: &Runtime, path: &str) -> String {
    if path.starts_with('/') {
        return path.into();
    }
    let folder = runtime.working_dir.trim_end_matches('/');
    format!("{folder}/{path}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::*;
    use crate::dockerfile;
    use crate::layer::Entry;

    const NATIVE: &str = "FROM scratch\nCOPY .elasticdl/ /\nCOPY zoo/ /model_zoo/\n\
        ENV PATH=/usr/local/bin\nUSER 1000:1000\nENTRYPOINT [\"elasticdl\"]\n";

    fn context(dir: &Path) -> Context {
        std::fs::create_dir_all(dir.join("zoo")).unwrap();
        std::fs::write(dir.join("zoo/model.py"), "model").unwrap();
        Context::open(dir, vec![Entry::bytes("usr/local/bin/elasticdl", 0o755, "program")]).unwrap()
    }

    fn build_in(dir: &Path, text: &str, base: Option<&str>) -> (Store, Descriptor) {
        let store = Store::open(&dir.join("store")).unwrap();
        let context = context(dir);
        let parse = |text| dockerfile::parse(text, &BTreeMap::new()).unwrap();
        let base = base.map(|text| build(&store, None, &parse(text), &context).unwrap());
        let base = base.map(|base| store.image(&base).unwrap());
        let built = build(&store, base.as_ref(), &parse(text), &context).unwrap();
        (store, built)
    }

    #[test]
    fn the_same_files_give_the_same_image_anywhere_and_any_time() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (_, first) = build_in(one.path(), NATIVE, None);
        let mut later = std::fs::File::options();
        let file = later.write(true).open(one.path().join("zoo/model.py")).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        let (_, second) = build_in(two.path(), NATIVE, None);
        assert_eq!(first, second);
    }

    #[test]
    fn layers_go_on_top_of_the_base_whose_settings_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let on_top = "FROM base\nCOPY zoo/model.py /model_zoo/other.py\nENV B=2\nCMD [\"train\"]\n";
        let (store, built) = build_in(dir.path(), on_top, Some(NATIVE));
        let image = store.image(&built).unwrap();
        assert_eq!(image.manifest.layers.len(), 3);
        assert_eq!(image.config.rootfs.diff_ids.len(), 3);
        let runtime = &image.config.config;
        assert_eq!(runtime.env, ["PATH=/usr/local/bin", "B=2"]);
        assert_eq!(
            (runtime.user.as_str(), runtime.cmd.as_slice()),
            ("1000:1000", &["train".to_owned()][..])
        );
    }

    #[test]
    fn a_line_that_must_be_run_is_refused_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let file = dockerfile::parse("FROM scratch\nRUN make", &BTreeMap::new()).unwrap();
        let error = build(&store, None, &file, &context(dir.path())).unwrap_err();
        assert!(error.to_string().starts_with("line 2 of the Dockerfile, `RUN make`, requires"));
        assert!(std::fs::read_dir(store.root().join("blobs/sha256")).unwrap().next().is_none());
    }
}
