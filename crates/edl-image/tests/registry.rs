// SPDX-License-Identifier: Apache-2.0
//! Images are pushed to a real registry and pulled again with the same bytes.
//!
//! The registry is Debian's `docker-registry`, on loopback; if it is not installed, the tests
//! are skipped.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use edl_image::build::{self, BuildRequest, Builder};
use edl_image::digest::Digest;
use edl_image::image::Descriptor;
use edl_image::reference::Reference;
use edl_image::registry::auth::Credentials;
use edl_image::registry::{Error, Registry};
use edl_image::store::Store;
use tempfile::TempDir;

const PROGRAM: &str = "docker-registry";
const SKIPPED: &str = "skipped: docker-registry is not installed; `make setup` installs it";
const PASSWORD: &str = "open sesame";
/// bcrypt of the password, for user `ann`.
const HTPASSWD: &str = "ann:$2b$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n";

/// A registry process that ends with the test.
struct Running {
    child: Child,
    address: String,
    folder: TempDir,
}

impl Running {
    /// `None` if it is not installed.
    fn start(has_password: bool) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().display();
        let mut config = format!(
            "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {root}}}}}\n\
             http: {{addr: '127.0.0.1:0'}}\n"
        );
        if has_password {
            fs::write(folder.path().join("htpasswd"), HTPASSWD).unwrap();
            config += &format!("auth: {{htpasswd: {{realm: here, path: {root}/htpasswd}}}}\n");
        }
        let file = folder.path().join("config.yml");
        fs::write(&file, config).unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg(file).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().ok()?;
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = lines.find_map(|line| {
            let line = line.unwrap();
            let (_, rest) = line.split_once("listening on ")?;
            Some(rest.split('"').next().unwrap().to_owned())
        });
        // Read the pipe to its end, so the registry never blocks on it.
        std::thread::spawn(move || lines.for_each(drop));
        Some(Self { child, address: address.expect("it listens"), folder })
    }

    /// Changes one byte of what the registry has stored under a digest.
    fn damage(&self, digest: &Digest) {
        let hex = digest.hex();
        let folder = self.folder.path().join("docker/registry/v2/blobs/sha256");
        let path = folder.join(&hex[..2]).join(hex).join("data");
        let mut bytes = fs::read(&path).unwrap();
        bytes[0] ^= 1;
        fs::write(path, bytes).unwrap();
    }

    fn image(&self, name: &str) -> Reference {
        Reference::parse(&format!("{}/{name}", self.address)).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Builds an image of a small zoo; `text` is its Dockerfile.
fn build(folder: &Path, image: &Reference, text: &str) -> Descriptor {
    try_build(folder, image, text, BTreeMap::new()).unwrap()
}

fn try_build(
    folder: &Path,
    image: &Reference,
    text: &str,
    args: BTreeMap<String, String>,
) -> Result<Descriptor, build::Error> {
    fs::create_dir_all(folder.join("zoo")).unwrap();
    fs::write(folder.join("zoo/model.py"), "model").unwrap();
    fs::write(folder.join("Dockerfile"), text).unwrap();
    let request = BuildRequest {
        image: image.clone(),
        context: folder.into(),
        dockerfile: folder.join("Dockerfile"),
        args,
        builder: Builder::BuiltIn,
        program: Some(std::env::current_exe().unwrap()),
        output: None,
    };
    request.build(&folder.join("images"))?;
    let store = Store::open(&folder.join("images")).unwrap();
    Ok(store.find(image).unwrap().unwrap())
}

const NATIVE: &str = "FROM scratch\nCOPY .elasticdl/ /\nCOPY zoo/ /model_zoo/\nUSER 1000:1000\n";

#[test]
fn a_pulled_image_has_the_same_bytes_and_is_sent_only_once() {
    let Some(registry) = Running::start(false) else { return println!("{SKIPPED}") };
    let dir = tempfile::tempdir().unwrap();
    let image = registry.image("team/elasticdl:mnist");
    let built = build(dir.path(), &image, NATIVE);
    let images = dir.path().join("images");
    let first = build::push(&images, &image).unwrap().unwrap();
    assert_eq!((first.n_sent, first.n_there, &first.digest), (3, 0, &built.digest));
    let again = build::push(&images, &image).unwrap().unwrap();
    assert_eq!((again.n_sent, again.n_there, again.n_bytes), (0, 3, 0));

    let other = Store::open(&dir.path().join("other")).unwrap();
    let pulled = Registry::open(&image).unwrap().pull(&other).unwrap();
    assert_eq!(pulled.digest, built.digest);
    let ours = Store::open(&images).unwrap().image(&built).unwrap();
    assert_eq!(other.image(&pulled).unwrap().manifest, ours.manifest);
    for blob in ours.manifest.layers.iter().chain([&ours.manifest.config]) {
        other.read(&blob.digest).unwrap();
    }
    let by_digest = format!("{}@{}", image.tagged(), built.digest);
    let by_digest = Registry::open(&Reference::parse(&by_digest).unwrap()).unwrap();
    assert_eq!(by_digest.pull(&other).unwrap().digest, built.digest);
}

#[test]
fn an_image_is_built_on_a_base_image_from_a_registry() {
    let Some(registry) = Running::start(false) else { return println!("{SKIPPED}") };
    let dir = tempfile::tempdir().unwrap();
    let base = registry.image("base:1");
    build(dir.path(), &base, NATIVE);
    build::push(&dir.path().join("images"), &base).unwrap();

    // Simulates another machine, which does not have the base image.
    let other = tempfile::tempdir().unwrap();
    let image = registry.image("model:1");
    let text = format!("FROM {}\nCOPY zoo/model.py /model_zoo/second.py\n", base.tagged());
    let built = build(other.path(), &image, &text);
    let images = other.path().join("images");
    let whole = Store::open(&images).unwrap().image(&built).unwrap();
    assert_eq!(whole.manifest.layers.len(), 3);
    assert_eq!(whole.config.config.user, "1000:1000");
    let pushed = build::push(&images, &image).unwrap().unwrap();
    assert_eq!(pushed.digest, built.digest);
}

/// The base image is a build argument, as `elasticdl zoo build --base_image` sets it.
#[test]
fn a_base_image_pinned_by_its_digest_is_that_image_or_the_build_fails() {
    let Some(registry) = Running::start(false) else { return println!("{SKIPPED}") };
    let dir = tempfile::tempdir().unwrap();
    let base = registry.image("base:1");
    let pinned = build(dir.path(), &base, NATIVE);
    let images = dir.path().join("images");
    build::push(&images, &base).unwrap();
    let layers = Store::open(&images).unwrap().image(&pinned).unwrap().manifest.layers;
    // The tag is moved to another image.
    build(dir.path(), &base, &format!("{NATIVE}ENV MOVED=1\n"));
    build::push(&images, &base).unwrap();

    let text = "ARG BASE_IMAGE=scratch\nFROM ${BASE_IMAGE}\nCOPY zoo/model.py /second.py\n";
    let image = registry.image("model:1");
    let on = |digest: &Digest| {
        // On a machine that does not have the base image.
        let other = tempfile::tempdir().unwrap();
        let name = format!("{}@{digest}", base.tagged());
        let built = try_build(other.path(), &image, text, [("BASE_IMAGE".into(), name)].into())?;
        let store = Store::open(&other.path().join("images")).unwrap();
        Ok::<_, build::Error>(store.image(&built).unwrap())
    };
    let whole = on(&pinned.digest).unwrap();
    assert_eq!(whole.manifest.layers[..layers.len()], layers);
    assert!(!whole.config.config.env.iter().any(|variable| variable == "MOVED=1"));
    let is_missing =
        |error: &build::Error| matches!(error, build::Error::Registry(Error::NotFound(..)));
    let error = on(&Digest::of(b"another image")).unwrap_err();
    assert!(is_missing(&error), "{error}");
    registry.damage(&layers[0].digest);
    let error = on(&pinned.digest).unwrap_err();
    assert!(matches!(error, build::Error::Registry(Error::Digest(..))), "{error}");
}

#[test]
fn without_a_password_the_error_suggests_logging_in() {
    let Some(registry) = Running::start(true) else { return println!("{SKIPPED}") };
    let dir = tempfile::tempdir().unwrap();
    let image = registry.image("elasticdl:mnist");
    let built = build(dir.path(), &image, NATIVE);
    let store = Store::open(&dir.path().join("images")).unwrap();
    let push = |credentials| Registry::open_as(&image, credentials).unwrap().push(&store, &built);
    let password =
        |password: &str| Credentials::Password { user: "ann".into(), password: password.into() };
    for wrong in [Credentials::None, password("guess")] {
        let error = push(wrong).unwrap_err();
        assert!(matches!(error, Error::Unauthorized(_)), "{error}");
        assert!(error.to_string().ends_with(&format!("run `docker login {}`", registry.address)));
    }
    assert_eq!(push(password(PASSWORD)).unwrap().digest, built.digest);
}

#[test]
fn a_missing_image_is_named() {
    let Some(registry) = Running::start(false) else { return println!("{SKIPPED}") };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("images")).unwrap();
    let missing = Registry::open(&registry.image("none:1")).unwrap().pull(&store).unwrap_err();
    assert!(
        missing.to_string().ends_with(
            "has no image `127.0.0.1:PORT/none:1`"
                .replace("127.0.0.1:PORT", &registry.address)
                .as_str()
        ),
        "{missing}"
    );
    let address = registry.address.clone();
    drop(registry);
    let gone = Registry::open(&Reference::parse(&format!("{address}/a")).unwrap()).unwrap_err();
    assert!(gone.to_string().starts_with(&format!("cannot reach registry `{address}`")), "{gone}");
}
