// SPDX-License-Identifier: Apache-2.0
//! Data sets on object stores: their files are downloaded once and then read from this machine.
//!
//! A file is cached by its address, size and version tag, so only a changed object is downloaded
//! again. Credentials come from the environment variables of the stores' own tools.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use object_store::path::Path as ObjectPath;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt as _};
use tokio_stream::StreamExt as _;
use url::Url;

use crate::error::Error;
use crate::location::{DataFile, is_data};

/// Downloads the files that are not cached, and lists all files.
pub(crate) fn fetch(location: &str, cache_dir: Option<&Path>) -> Result<Vec<DataFile>, Error> {
    let cache = cache_dir.map_or_else(default_cache, Path::to_path_buf);
    // A separate thread: the caller may be inside an async runtime, which must not block.
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(Error::io("start a runtime for", Path::new(location)))?;
            runtime.block_on(fetch_all(location, &cache))
        });
        worker.join().unwrap_or_else(|_| {
            Err(Error::Refused(format!("cannot read `{location}`: the reader crashed")))
        })
    })
}

fn default_cache() -> PathBuf {
    let under_home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let root = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(under_home);
    root.unwrap_or_else(std::env::temp_dir).join("elasticdl").join("objects")
}

async fn fetch_all(location: &str, cache: &Path) -> Result<Vec<DataFile>, Error> {
    let refused = |error: object_store::Error| refuse(location, &error);
    // A provider that was already installed stays.
    drop(rustls::crypto::ring::default_provider().install_default());
    let (folder, pattern) = split_pattern(location)?;
    let url = Url::parse(folder)
        .map_err(|error| Error::Refused(format!("`{location}` is not a valid URL: {error}")))?;
    // The builders expect lower-case names and ignore unknown ones.
    let environment = std::env::vars_os().filter_map(|(key, value)| {
        Some((key.into_string().ok()?.to_ascii_lowercase(), value.into_string().ok()?))
    });
    // A URL with `http` allows plain HTTP.
    let plain = (url.scheme() == "http").then(|| ("allow_http".to_owned(), "true".to_owned()));
    let options = environment.chain(plain);
    let (store, root) = object_store::parse_url_opts(&url, options).map_err(refused)?;
    let objects = list(&*store, &root, pattern.as_ref()).await.map_err(refused)?;
    let mut files = Vec::new();
    for object in objects {
        let name = object.location.filename().unwrap_or_default().to_owned();
        let address = format!("{}{}", &url[..url::Position::BeforePath], object.location);
        let path = fetch_one(&*store, &object, &address, cache).await?;
        files.push(DataFile { path, name });
    }
    Ok(files)
}

/// Splits a pattern off the end of an address.
fn split_pattern(location: &str) -> Result<(&str, Option<glob::Pattern>), Error> {
    match location.rsplit_once('/') {
        Some((folder, last)) if last.contains(['*', '[']) => {
            let pattern = glob::Pattern::new(last)
                .map_err(|error| Error::Refused(format!("invalid pattern `{last}`: {error}")))?;
            Ok((folder, Some(pattern)))
        }
        _ => Ok((location, None)),
    }
}

/// The object of this name, or else the objects directly below it.
async fn list(
    store: &dyn ObjectStore,
    root: &ObjectPath,
    pattern: Option<&glob::Pattern>,
) -> Result<Vec<ObjectMeta>, object_store::Error> {
    let alone = match pattern {
        None => Some(store.head(root).await),
        Some(_) => None,
    };
    if let Some(Ok(object)) = alone {
        return Ok(vec![object]);
    }
    let listed = store.list_with_delimiter(Some(root)).await?;
    let wanted = |object: &ObjectMeta| {
        let name = object.location.filename().unwrap_or_default();
        is_data(name) && pattern.is_none_or(|pattern| pattern.matches(name))
    };
    let found: Vec<ObjectMeta> = listed.objects.into_iter().filter(wanted).collect();
    match alone {
        // Neither a file nor a folder: the error about the file says more.
        Some(Err(error)) if found.is_empty() => Err(error),
        _ => Ok(found),
    }
}

async fn fetch_one(
    store: &dyn ObjectStore,
    object: &ObjectMeta,
    address: &str,
    cache: &Path,
) -> Result<PathBuf, Error> {
    let version =
        format!("{address}\n{}\n{:?}\n{}", object.size, object.e_tag, object.last_modified);
    let folder = cache.join(&blake3::hash(version.as_bytes()).to_hex()[..32]);
    let name = object.location.filename().unwrap_or("object");
    let path = folder.join(name);
    if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() == object.size) {
        return Ok(path);
    }
    std::fs::create_dir_all(&folder).map_err(Error::io("make", &folder))?;
    // Several processes may download the same file at once, so each uses a different name.
    let unfinished = folder.join(format!(".{name}.{}.tmp", std::process::id()));
    let file = File::create(&unfinished).map_err(Error::io("write", &unfinished))?;
    let mut out = BufWriter::new(file);
    let failed = |error: object_store::Error| refuse(address, &error);
    let mut pieces = store.get(&object.location).await.map_err(failed)?.into_stream();
    let mut len = 0;
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(failed)?;
        out.write_all(&piece).map_err(Error::io("write", &unfinished))?;
        len += piece.len() as u64;
    }
    if len != object.size {
        return Err(Error::Refused(format!(
            "`{address}` has {len} bytes instead of {}: it changed during the download; try again",
            object.size
        )));
    }
    out.flush().map_err(Error::io("write", &unfinished))?;
    std::fs::rename(&unfinished, &path).map_err(Error::io("write", &path))?;
    Ok(path)
}

fn refuse(location: &str, error: &object_store::Error) -> Error {
    if matches!(error, object_store::Error::NotFound { .. }) {
        return Error::Missing { location: location.to_owned() };
    }
    Error::Refused(format!("cannot read `{location}`: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::net::TcpListener;

    use super::*;

    /// Serves one file to every client, until the process ends.
    fn serve(content: &'static [u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let request = lines.next().unwrap().unwrap();
                lines.find(|line| line.as_ref().is_ok_and(String::is_empty));
                let found = request.contains(" /train/a.csv ");
                let status = if found { "200 OK" } else { "404 Not Found" };
                let content = if found { content } else { b"" };
                let len = content.len();
                let head = format!(
                    "HTTP/1.1 {status}\r\nContent-Length: {len}\r\nETag: \"1\"\r\nConnection: close\r\n\r\n"
                );
                stream.write_all(head.as_bytes()).unwrap();
                if request.starts_with("GET") {
                    stream.write_all(content).unwrap();
                }
            }
        });
        format!("http://{address}")
    }

    #[test]
    fn a_file_on_a_web_server_is_fetched() {
        let cache = tempfile::tempdir().unwrap();
        let server = serve(b"x\n1\n");
        let files = fetch(&format!("{server}/train/a.csv"), Some(cache.path())).unwrap();
        assert_eq!(files[0].name, "a.csv");
        assert_eq!(std::fs::read(&files[0].path).unwrap(), b"x\n1\n");
        let error = fetch(&format!("{server}/train/b.csv"), Some(cache.path())).unwrap_err();
        assert!(error.to_string().contains("/train/b.csv`"), "{error}");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let error = fetch("s3//x://y z", None).unwrap_err().to_string();
        assert!(error.contains("`s3//x://y z`"), "{error}");
        let error = fetch("ftp://host/file", None).unwrap_err().to_string();
        assert!(error.contains("`ftp://host/file`"), "{error}");
    }

    #[test]
    fn objects_are_fetched_once_and_again_only_when_they_change() {
        let (store, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(store.path().join("train")).unwrap();
        for name in ["a.csv", "b.csv", "_SUCCESS", "train/c.csv"] {
            std::fs::write(store.path().join(name), format!("x\n{name}\n")).unwrap();
        }
        // The library's own store over a folder stands for all stores.
        let url = Url::from_directory_path(store.path()).unwrap().to_string();
        let mut first = fetch(url.trim_end_matches('/'), Some(cache.path())).unwrap();
        first.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<&str> = first.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["a.csv", "b.csv"]);
        assert_eq!(std::fs::read(&first[0].path).unwrap(), b"x\na.csv\n");

        let again = fetch(&format!("{url}a.csv"), Some(cache.path())).unwrap();
        assert_eq!(again[0].path, first[0].path);
        let matched = fetch(&format!("{url}[b]*"), Some(cache.path())).unwrap();
        assert_eq!(matched[0].path, first[1].path);

        std::fs::write(store.path().join("a.csv"), "x\nanother length\n").unwrap();
        let changed = fetch(&format!("{url}a.csv"), Some(cache.path())).unwrap();
        assert_ne!(changed[0].path, first[0].path);
        assert_eq!(std::fs::read(&changed[0].path).unwrap(), b"x\nanother length\n");
    }
}
