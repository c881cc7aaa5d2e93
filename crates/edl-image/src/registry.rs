// SPDX-License-Identifier: Apache-2.0
//! Registries, by the OCI distribution protocol.
//!
//! Every blob sent or received is checked by its digest. Blobs that the registry has are not sent.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::path::Path;

use crate::digest::Digest;
use crate::image::{self, Descriptor, Index, Manifest};
use crate::reference::{self, Reference};
use crate::store::{self, Store};
use auth::{Challenge, Credentials};
use http::{Answer, Body, Http, Request};

pub mod auth;
mod http;

/// Largest manifest that is read; registries take 4 MiB.
const MAX_MANIFEST: u64 = 8 << 20;
const MANIFESTS: [&str; 4] =
    [image::MANIFEST, image::INDEX, image::DOCKER_MANIFEST, image::DOCKER_INDEX];

/// One repository of a registry.
#[derive(Debug)]
pub struct Registry {
    image: Reference,
    http: Http,
    credentials: Credentials,
    /// The `Authorization` header that the registry accepted last.
    authorization: RefCell<Option<String>>,
}

/// What a push did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    pub digest: Digest,
    pub n_sent: usize,
    /// Blobs that the registry already had.
    pub n_there: usize,
    pub n_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot reach registry `{0}`; check its name and that it is running")]
    Connect(String, #[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("`{0}` is not a registry: it responded with status {1}; check the image's name")]
    NoRegistry(String, u16),
    #[error("registry `{0}` requires authentication; run `docker login {0}`")]
    Unauthorized(String),
    #[error(
        "registry `{host}` denied access to `{name}`; ask its administrator, or run `docker login {host}` as another user"
    )]
    Denied { host: String, name: String },
    #[error(
        "registry `{0}` asks to send the password to `{1}` without encryption; ask its administrator for an https address"
    )]
    Realm(String, String),
    #[error("registry `{0}` has no image `{1}`")]
    NotFound(String, String),
    #[error("registry `{host}` refused to {what}: {status}{message}")]
    Refused { host: String, what: String, status: u16, message: String },
    #[error("data from registry `{0}` does not match `{1}`; try again")]
    Digest(String, String),
    #[error("registry `{0}` has `{1}` only for other processor architectures")]
    Platform(String, String),
    #[error("registry `{0}` sent an invalid image")]
    Json(String, #[source] serde_json::Error),
    #[error("cannot read `{0}`")]
    Read(String, #[source] io::Error),
    #[error(transparent)]
    Auth(#[from] auth::Error),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Registry {
    /// The repository of an image, with the credentials that `docker login` left.
    pub fn open(image: &Reference) -> Result<Self, Error> {
        Self::open_as(image, Credentials::of(&image.host)?)
    }

    /// Opens it, and makes sure that it is a registry.
    pub fn open_as(image: &Reference, credentials: Credentials) -> Result<Self, Error> {
        let http = Http::new(image.is_loopback())
            .map_err(|error| Error::Connect(image.host.clone(), error.into()))?;
        let authorization = RefCell::new(None);
        let registry = Self { image: image.clone(), http, credentials, authorization };
        let url = format!("{}/v2/", image.address());
        let answer = registry.once(Request::new("GET", &url))?;
        match answer.status {
            200 | 401 | 403 => Ok(registry),
            status => Err(Error::NoRegistry(image.host.clone(), status)),
        }
    }

    /// Sends an image that is in the store under the name of this repository.
    pub fn push(&self, store: &Store, descriptor: &Descriptor) -> Result<Pushed, Error> {
        let image = store.image(descriptor)?;
        let digest = image.descriptor.digest.clone();
        let mut pushed = Pushed { digest, n_sent: 0, n_there: 0, n_bytes: 0 };
        for blob in image.manifest.layers.iter().chain([&image.manifest.config]) {
            if self.has(blob)? {
                pushed.n_there += 1;
                continue;
            }
            self.send_blob(&store.path(&blob.digest), blob)?;
            pushed.n_sent += 1;
            pushed.n_bytes += blob.size;
        }
        let bytes = store.read(&image.descriptor.digest)?;
        self.send_manifest(&bytes, &image.descriptor)?;
        Ok(pushed)
    }

    /// Fetches an image into the store; of several, the one for this machine's architecture.
    pub fn pull(&self, store: &Store) -> Result<Descriptor, Error> {
        let mut descriptor = self.fetch_manifest(store, self.image.version())?;
        if descriptor.is_index() {
            let index: Index = self.parse(&store.read(&descriptor.digest)?)?;
            let platform = || Error::Platform(self.host(), self.image.to_string());
            let inner = index.for_this_machine().ok_or_else(platform)?;
            descriptor = self.fetch_manifest(store, inner.digest.as_str())?;
        }
        let manifest: Manifest = self.parse(&store.read(&descriptor.digest)?)?;
        for blob in manifest.layers.iter().chain([&manifest.config]) {
            if !store.has(blob) {
                self.fetch_blob(store, blob)?;
            }
        }
        Ok(descriptor)
    }

    fn has(&self, blob: &Descriptor) -> Result<bool, Error> {
        let url = self.url(&format!("blobs/{}", blob.digest));
        let answer = self.ask(Request::new("HEAD", &url))?;
        match answer.status {
            200 => Ok(true),
            404 => Ok(false),
            _ => Err(self.refused("check for a blob", answer)),
        }
    }

    fn send_blob(&self, path: &Path, blob: &Descriptor) -> Result<(), Error> {
        let begun = self.ask(Request::new("POST", &self.url("blobs/uploads/")))?;
        let location = match (begun.status, &begun.location) {
            (202, Some(location)) => absolute(&self.image.address(), location),
            _ => return Err(self.refused("accept a blob", begun)),
        };
        let separator = if location.contains('?') { '&' } else { '?' };
        let url = format!("{location}{separator}digest={}", blob.digest);
        let file =
            || File::open(path).map_err(|error| Error::Read(path.display().to_string(), error));
        let kind = [("Content-Type", "application/octet-stream")];
        let answer = self.ask(Request {
            headers: &kind,
            body: Body::File(&file),
            ..Request::new("PUT", &url)
        })?;
        if answer.status != 201 {
            return Err(self.refused("accept a blob", answer));
        }
        self.check(&answer, &blob.digest)
    }

    fn send_manifest(&self, bytes: &[u8], descriptor: &Descriptor) -> Result<(), Error> {
        let url = self.url(&format!("manifests/{}", self.image.tag));
        let kind = [("Content-Type", descriptor.media_type.as_str())];
        let answer = self.ask(Request {
            headers: &kind,
            body: Body::Bytes(bytes),
            ..Request::new("PUT", &url)
        })?;
        if answer.status != 201 {
            return Err(self.refused("accept the image", answer));
        }
        self.check(&answer, &descriptor.digest)
    }

    fn fetch_manifest(&self, store: &Store, version: &str) -> Result<Descriptor, Error> {
        let accepted = MANIFESTS.join(", ");
        let url = self.url(&format!("manifests/{version}"));
        let answer =
            self.ask(Request { headers: &[("Accept", &accepted)], ..Request::new("GET", &url) })?;
        match answer.status {
            200 => {}
            404 => return Err(Error::NotFound(self.host(), self.image.to_string())),
            _ => return Err(self.refused("send the image", answer)),
        }
        let media_type = answer.content_type.clone().unwrap_or_default();
        let mut blob = store.blob()?;
        answer.copy(MAX_MANIFEST, &mut blob).map_err(|error| self.failed(error))?;
        let descriptor = blob.finish(&media_type)?;
        let is_wrong = Digest::parse(version).is_ok_and(|wanted| wanted != descriptor.digest);
        if is_wrong { Err(Error::Digest(self.host(), version.into())) } else { Ok(descriptor) }
    }

    fn fetch_blob(&self, store: &Store, wanted: &Descriptor) -> Result<(), Error> {
        let url = self.url(&format!("blobs/{}", wanted.digest));
        let answer = self.ask(Request::new("GET", &url))?;
        if answer.status != 200 {
            return Err(self.refused("send a blob", answer));
        }
        let mut blob = store.blob()?;
        answer.copy(wanted.size, &mut blob).map_err(|error| self.failed(error))?;
        let found = blob.finish(&wanted.media_type)?;
        if found.digest == wanted.digest {
            Ok(())
        } else {
            Err(Error::Digest(self.host(), wanted.digest.to_string()))
        }
    }

    /// Compares the digest of what the registry stored with that of what was sent.
    fn check(&self, answer: &Answer, sent: &Digest) -> Result<(), Error> {
        match &answer.digest {
            Some(stored) if stored != sent.as_str() => {
                Err(Error::Digest(self.host(), sent.to_string()))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Sends a request, and repeats it with credentials if the registry requires them.
    fn ask(&self, request: Request<'_>) -> Result<Answer, Error> {
        let answer = self.once(request)?;
        if answer.status != 401 {
            return self.admitted(answer);
        }
        let challenge = answer.challenges.iter().find_map(|header| Challenge::parse(header));
        let challenge = challenge.ok_or_else(|| Error::Unauthorized(self.host()))?;
        *self.authorization.borrow_mut() = Some(self.authorize(&challenge)?);
        let answer = self.once(request)?;
        if answer.status == 401 {
            return Err(Error::Unauthorized(self.host()));
        }
        self.admitted(answer)
    }

    fn admitted(&self, answer: Answer) -> Result<Answer, Error> {
        if answer.status == 403 {
            return Err(Error::Denied { host: self.host(), name: self.image.name.clone() });
        }
        Ok(answer)
    }

    fn once(&self, request: Request<'_>) -> Result<Answer, Error> {
        let authorization = self.authorization.borrow().clone();
        // An upload may go to another host, which must not receive the token.
        let is_ours = request.url.starts_with(&format!("{}/", self.image.address()));
        let shown = authorization.as_deref().filter(|_| is_ours);
        let mut all = request.headers.to_vec();
        all.extend(shown.map(|value| ("Authorization", value)));
        self.http.send(Request { headers: &all, ..request }).map_err(|error| self.failed(error))
    }

    /// The `Authorization` header for a challenge.
    fn authorize(&self, challenge: &Challenge) -> Result<String, Error> {
        let unauthorized = || Error::Unauthorized(self.host());
        let Challenge::Bearer { realm, service, scope } = challenge else {
            return self.credentials.basic().ok_or_else(unauthorized);
        };
        if !self.may_know(realm) {
            return Err(Error::Realm(self.host(), realm.clone()));
        }
        let query = [("service", service.as_str()), ("scope", scope.as_str())];
        let query = query.map(|(name, value)| (name, http::escaped(value)));
        let query = query.map(|(name, value)| format!("{name}={value}")).join("&");
        let answer = if let Credentials::Identity(token) = &self.credentials {
            let token = http::escaped(token);
            let form = format!(
                "grant_type=refresh_token&client_id=elasticdl&refresh_token={token}&{query}"
            );
            let kind = [("Content-Type", "application/x-www-form-urlencoded")];
            let body = Body::Bytes(form.as_bytes());
            self.http.send(Request { headers: &kind, body, ..Request::new("POST", realm) })
        } else {
            let basic = self.credentials.basic();
            let shown: Vec<_> =
                basic.iter().map(|value| ("Authorization", value.as_str())).collect();
            let separator = if realm.contains('?') { '&' } else { '?' };
            let url = format!("{realm}{separator}{query}");
            self.http.send(Request { headers: &shown, ..Request::new("GET", &url) })
        };
        let answer = answer.map_err(|error| self.failed(error))?;
        if answer.status != 200 {
            return Err(unauthorized());
        }
        let mut text = Vec::new();
        answer.copy(MAX_MANIFEST, &mut text).map_err(|error| self.failed(error))?;
        let answer: serde_json::Value = self.parse(&text)?;
        let token = answer.get("token").or_else(|| answer.get("access_token"));
        let token = token.and_then(|token| token.as_str()).ok_or_else(unauthorized)?;
        Ok(format!("Bearer {token}"))
    }

    /// Whether the server at `realm` may get credentials: over TLS, or on this machine if the registry
    /// is there, too.
    fn may_know(&self, realm: &str) -> bool {
        match http::scheme_and_host(realm) {
            Some((scheme, _)) if scheme == "https" => true,
            Some((scheme, host)) => {
                scheme == "http" && self.image.is_loopback() && reference::is_loopback(&host)
            }
            None => false,
        }
    }

    fn parse<T: serde::de::DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, Error> {
        serde_json::from_slice(bytes).map_err(|error| Error::Json(self.host(), error))
    }

    fn refused(&self, what: &str, answer: Answer) -> Error {
        let status = answer.status;
        let message = answer.message().map_or(String::new(), |message| format!(", {message}"));
        Error::Refused { host: self.host(), what: what.into(), status, message }
    }

    fn failed(&self, error: http::Error) -> Error {
        Error::Connect(self.host(), Box::new(error))
    }

    fn host(&self) -> String {
        self.image.host.clone()
    }

    fn url(&self, path: &str) -> String {
        format!("{}/v2/{}/{path}", self.image.address(), self.image.name)
    }
}

fn absolute(address: &str, location: &str) -> String {
    if location.starts_with('/') { format!("{address}{location}") } else { location.into() }
}
