// SPDX-License-Identifier: Apache-2.0
//! Registries that require a token, and servers that are not registries, as fake HTTP servers.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::sync::mpsc;

use edl_image::reference::Reference;
use edl_image::registry::auth::Credentials;
use edl_image::registry::{Error, Registry};
use edl_image::store::Store;

/// Answers every request with `answer`, which gets the server's address, the request's first line
/// and its authorization. Also sends the requests to the receiver.
fn serve(
    answer: impl Fn(&str, &str, &str) -> String + Send + 'static,
) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, requests) = mpsc::channel();
    let own = address.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let first = lines.next().unwrap().unwrap();
            let headers: Vec<_> =
                lines.map_while(|line| line.ok().filter(|line| !line.is_empty())).collect();
            let shown = headers.iter().find_map(|line| {
                let (name, value) = line.split_once(": ")?;
                name.eq_ignore_ascii_case("authorization").then_some(value)
            });
            let shown = shown.unwrap_or_default();
            let _gone = sender.send(format!("{first} {shown}"));
            let _closed = stream.write_all(answer(&own, &first, shown).as_bytes());
        }
    });
    (address, requests)
}

fn http(status: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    )
}

#[test]
fn a_token_is_fetched_with_the_password_and_sent_only_to_the_registry() {
    let (address, requests) = serve(|own, first, shown| {
        if first.contains("/token?") {
            return http("200 OK", "", r#"{"token": "t0ken"}"#);
        }
        if shown != "Bearer t0ken" {
            let scope = r#"service="here",scope="repository:a:pull""#;
            let header =
                format!("WWW-Authenticate: Bearer realm=\"http://{own}/token\",{scope}\r\n");
            return http("401 Unauthorized", &header, "");
        }
        http("404 Not Found", "", "")
    });
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let image = Reference::parse(&format!("{address}/a:b")).unwrap();
    let ann = Credentials::Password { user: "ann".into(), password: "x".into() };
    let error = Registry::open_as(&image, ann).unwrap().pull(&store).unwrap_err();
    assert!(matches!(error, Error::NotFound(..)), "{error}");
    let seen: Vec<_> = requests.try_iter().collect();
    assert_eq!(seen.len(), 4, "{seen:?}");
    assert_eq!(seen[0], "GET /v2/ HTTP/1.1 ");
    assert_eq!(seen[1], "GET /v2/a/manifests/b HTTP/1.1 ");
    let token = "GET /token?service=here&scope=repository%3Aa%3Apull HTTP/1.1 Basic YW5uOng=";
    assert_eq!(seen[2], token);
    assert_eq!(seen[3], "GET /v2/a/manifests/b HTTP/1.1 Bearer t0ken");
}

#[test]
fn a_server_that_is_not_a_registry_is_recognized() {
    let (address, _requests) = serve(|_, _, _| http("404 Not Found", "", "<html>"));
    let image = Reference::parse(&format!("{address}/a")).unwrap();
    let error = Registry::open_as(&image, Credentials::None).unwrap_err();
    assert!(error.to_string().starts_with(&format!("`{address}` is not a registry")), "{error}");
}

#[test]
fn bytes_with_the_wrong_digest_are_refused() {
    let wanted = edl_image::digest::Digest::of(b"the image");
    let (address, _requests) = serve(|_, first, _| match first {
        "GET /v2/ HTTP/1.1" => http("200 OK", "", ""),
        _ => http("200 OK", "", "another image"),
    });
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let image = Reference::parse(&format!("{address}/a@{wanted}")).unwrap();
    let error = Registry::open_as(&image, Credentials::None).unwrap().pull(&store).unwrap_err();
    assert!(matches!(error, Error::Digest(..)), "{error}");
}

#[test]
fn a_password_is_never_sent_without_encryption_to_another_machine() {
    for realm in [
        "http://registry.example/token",
        "http://127.0.0.1@registry.example/token",
        "HTTP://registry.example/token",
        "ftp://127.0.0.1/token",
        "/token",
        "",
    ] {
        let header = format!("WWW-Authenticate: Bearer realm=\"{realm}\"\r\n");
        let (address, requests) = serve(move |_, _, _| http("401 Unauthorized", &header, ""));
        let dir = tempfile::tempdir().unwrap();
        let image = Reference::parse(&format!("{address}/a:b")).unwrap();
        for credentials in [
            Credentials::Password { user: "ann".into(), password: "x".into() },
            Credentials::Identity("t".into()),
        ] {
            let registry = Registry::open_as(&image, credentials).unwrap();
            let error = registry.pull(&Store::open(dir.path()).unwrap()).unwrap_err();
            assert!(matches!(error, Error::Realm(..)), "{realm}: {error}");
        }
        let seen: Vec<_> = requests.try_iter().collect();
        assert!(seen.iter().all(|request| request.ends_with("HTTP/1.1 ")), "{realm}: {seen:?}");
    }
}
