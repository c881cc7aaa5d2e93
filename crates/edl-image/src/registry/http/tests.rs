// SPDX-License-Identifier: Apache-2.0
//! Servers that are silent, stop reading or redirect, in a few lines of TCP.

use std::io::{BufRead as _, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;

use super::*;

const SHORT: Duration = Duration::from_millis(50);

/// A server that handles every connection with `handle`.
fn serve(handle: impl Fn(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || listener.incoming().for_each(|stream| handle(stream.unwrap())));
    address
}

/// The lines of a request up to the empty one.
fn head(stream: &TcpStream) -> Vec<String> {
    let lines = BufReader::new(stream.try_clone().unwrap()).lines();
    lines.map_while(|line| line.ok().filter(|line| !line.is_empty())).collect()
}

fn get(http: &Http, url: &str) -> Result<Answer, Error> {
    http.send(Request {
        headers: &[("Authorization", "secret"), ("Accept", "all")],
        ..Request::new("GET", url)
    })
}

#[test]
fn a_silent_server_times_out() {
    let (keep, _kept) = mpsc::channel();
    let address = serve(move |stream| keep.send(stream).unwrap());
    let http = Http::with(None, Limits { answer: SHORT, ..LIMITS }).unwrap();
    let error = get(&http, &format!("http://{address}/")).unwrap_err();
    assert!(matches!(error, Error::Silent(_)), "{error}");
}

#[test]
fn a_server_that_takes_nothing_is_not_waited_for_forever() {
    let (keep, _kept) = mpsc::channel();
    let address = serve(move |stream| keep.send(stream).unwrap());
    let http = Http::with(None, Limits { progress: SHORT, ..LIMITS }).unwrap();
    let file = tempfile::tempfile().unwrap();
    // Far more than what the kernel takes for the server.
    file.set_len(1 << 30).unwrap();
    let open = || Ok(file.try_clone().unwrap());
    let sent = http.send(Request {
        body: Body::File(&open),
        ..Request::new("PUT", &format!("http://{address}/"))
    });
    assert!(matches!(sent.unwrap_err(), Error::Stuck(_)));
}

#[test]
fn an_answer_that_stops_in_the_middle_is_not_waited_for_forever() {
    let (keep, _kept) = mpsc::channel();
    let address = serve(move |mut stream| {
        head(&stream);
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf").unwrap();
        keep.send(stream).unwrap();
    });
    let http = Http::with(None, Limits { progress: SHORT, ..LIMITS }).unwrap();
    let answer = get(&http, &format!("http://{address}/")).unwrap();
    let mut text = Vec::new();
    let error = answer.copy(100, &mut text).unwrap_err();
    assert_eq!(text, b"half");
    let Error::Body(cause) = error else { panic!("{error}") };
    assert_eq!(cause.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn a_file_that_shrinks_meanwhile_is_an_error() {
    let address = serve(|stream| drop(head(&stream)));
    let http = Http::with(None, LIMITS).unwrap();
    let open = || {
        let file = tempfile::tempfile().unwrap();
        file.set_len(100).unwrap();
        // Its end is where reading begins.
        io::Seek::seek(&mut &file, io::SeekFrom::End(0)).unwrap();
        Ok(file)
    };
    http.send(Request {
        body: Body::File(&open),
        ..Request::new("PUT", &format!("http://{address}/"))
    })
    .unwrap_err();
}

#[test]
fn an_idle_closed_connection_is_replaced() {
    let (closed, is_closed) = mpsc::channel();
    let address = serve(move |mut stream| {
        head(&stream);
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        drop(stream);
        closed.send(()).unwrap();
    });
    let http = Http::with(None, LIMITS).unwrap();
    let url = format!("http://{address}/");
    for method in ["GET", "PUT", "GET"] {
        let answer =
            http.send(Request { body: Body::Bytes(b""), ..Request::new(method, &url) }).unwrap();
        answer.copy(0, &mut Vec::new()).unwrap();
        is_closed.recv().unwrap();
    }
}

#[test]
fn redirects_are_followed_without_credentials() {
    let (sender, heads) = mpsc::channel();
    let address = serve(move |mut stream| {
        let head = head(&stream);
        let answer = match head[0].as_str() {
            "GET /a HTTP/1.1" => "307 Temporary Redirect\r\nLocation: /b",
            _ => "200 OK",
        };
        sender.send(head).unwrap();
        write!(stream, "HTTP/1.1 {answer}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            .unwrap();
    });
    let http = Http::with(None, LIMITS).unwrap();
    assert_eq!(get(&http, &format!("http://{address}/a")).unwrap().status, 200);
    let seen: Vec<_> = heads.try_iter().collect();
    let has = |head: &[String], line: &str| head.iter().any(|each| each == line);
    assert!(has(&seen[0], "authorization: secret") && has(&seen[0], "accept: all"), "{seen:?}");
    assert!(seen[1][0] == "GET /b HTTP/1.1" && has(&seen[1], "accept: all"), "{seen:?}");
    assert!(!has(&seen[1], "authorization: secret"), "{seen:?}");
}

#[test]
fn what_has_a_body_is_not_sent_elsewhere_and_circles_end() {
    let address = serve(|mut stream| {
        head(&stream);
        let answer = "307 Temporary Redirect\r\nLocation: /again";
        write!(stream, "HTTP/1.1 {answer}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            .unwrap();
    });
    let http = Http::with(None, LIMITS).unwrap();
    let url = format!("http://{address}/");
    let put = http.send(Request::new("PUT", &url)).unwrap();
    assert_eq!(put.status, 307);
    assert!(matches!(get(&http, &url).unwrap_err(), Error::Redirects));
}

#[test]
fn a_location_is_resolved_against_its_request() {
    for (location, expected) in [
        ("https://b/c?d=e:f", "https://b/c?d=e:f"),
        ("//b/c", "http://b/c"),
        ("/c?u=http://x", "http://a:1/c?u=http://x"),
        ("?c", "http://a:1/x/y?c"),
        ("c/d#e", "http://a:1/x/c/d"),
    ] {
        assert_eq!(joined("http://a:1/x/y?z=/0", location), expected);
    }
    assert_eq!(joined("http://a", "b"), "http://a/b");
}

#[test]
fn a_proxy_that_refuses_a_tunnel_is_an_error() {
    let (sender, heads) = mpsc::channel();
    let proxy = serve(move |mut stream| {
        sender.send(head(&stream)).unwrap();
        stream.write_all(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n").unwrap();
    });
    let proxies = Matcher::builder().all(format!("http://ann:x@{proxy}")).build();
    let http = Http::with(Some(proxies), LIMITS).unwrap();
    let error = get(&http, "https://registry.invalid/v2/").unwrap_err();
    assert!(error.to_string().contains("proxy authorization required"), "{error}");
    let seen = heads.try_recv().unwrap();
    assert_eq!(seen[0], "CONNECT registry.invalid:443 HTTP/1.1");
    assert!(seen.contains(&"Proxy-Authorization: Basic YW5uOng=".to_owned()), "{seen:?}");
    assert!(!seen.iter().any(|line| line.contains("secret")), "{seen:?}");
}

#[test]
fn an_error_has_the_innermost_cause() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let http = Http::with(None, LIMITS).unwrap();
    let error = get(&http, &format!("http://{address}/")).unwrap_err();
    assert!(error.to_string().contains("Connection refused"), "{error}");
}
