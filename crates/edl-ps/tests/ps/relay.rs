// SPDX-License-Identifier: Apache-2.0
//! A man in the middle of a data connection, who sees and changes the client's frames.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use edl_net::frame::{HEADER_LEN, Header};

/// What is forwarded instead of a frame.
pub(crate) struct Forwarded {
    pub(crate) bytes: Vec<u8>,
    pub(crate) then_close: bool,
}

/// Called with each frame of a client; returns what to forward.
pub(crate) type Hook = Arc<dyn Fn(&Header, Vec<u8>) -> Forwarded + Send + Sync>;

pub(crate) fn forward(bytes: Vec<u8>) -> Forwarded {
    Forwarded { bytes, then_close: false }
}

/// Relays to the TCP server at `target`; returns the relay's address.
pub(crate) fn tcp(target: &str, hook: Hook) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let target = target.to_owned();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&target).unwrap());
            let (mut up_from, mut up_to) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            let hook = Arc::clone(&hook);
            std::thread::spawn(move || {
                up(&mut up_from, &mut up_to, &hook);
                let _ = up_to.shutdown(Shutdown::Write);
            });
            std::thread::spawn(move || {
                down(&server, &client);
                // Close both ends: the client must notice that its server is gone.
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    });
    address
}

/// Relays from a Unix socket at `path` to the one at `target`.
pub(crate) fn unix(path: &Path, target: &Path, hook: Hook) {
    let listener = UnixListener::bind(path).unwrap();
    let target = target.to_owned();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), UnixStream::connect(&target).unwrap());
            let (mut up_from, mut up_to) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            let hook = Arc::clone(&hook);
            std::thread::spawn(move || {
                up(&mut up_from, &mut up_to, &hook);
                let _ = up_to.shutdown(Shutdown::Write);
            });
            std::thread::spawn(move || {
                down(&server, &client);
                // Close both ends: the client must notice that its server is gone.
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    });
}

fn up(from: &mut impl Read, to: &mut impl Write, hook: &Hook) {
    loop {
        let mut head = [0; HEADER_LEN];
        if from.read_exact(&mut head).is_err() {
            return;
        }
        let header = Header::decode(&head).unwrap();
        let mut frame = head.to_vec();
        frame.resize(HEADER_LEN + usize::try_from(header.length).unwrap(), 0);
        if from.read_exact(&mut frame[HEADER_LEN..]).is_err() {
            return;
        }
        let Forwarded { bytes, then_close } = hook(&header, frame);
        if to.write_all(&bytes).is_err() || then_close {
            return;
        }
    }
}

/// Everything that passes a relay, in each direction.
#[derive(Clone, Default)]
pub(crate) struct Recorded {
    pub(crate) up: Arc<Mutex<Vec<u8>>>,
    pub(crate) down: Arc<Mutex<Vec<u8>>>,
}

impl Recorded {
    /// Whether these bytes were sent by a client, and by the server.
    pub(crate) fn contains(&self, bytes: &[u8]) -> (bool, bool) {
        let is_in = |all: &Mutex<Vec<u8>>| {
            all.lock().unwrap().windows(bytes.len()).any(|part| part == bytes)
        };
        (is_in(&self.up), is_in(&self.down))
    }
}

/// Relays to the TCP server at `target` and records the raw bytes. With `flip`, changes one byte
/// of what each client sends.
pub(crate) fn record(target: &str, flip: Option<(usize, u8)>) -> (String, Recorded) {
    let recorded = Recorded::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (target, all) = (target.to_owned(), recorded.clone());
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&target).unwrap());
            let ends = [client.try_clone().unwrap(), server.try_clone().unwrap()];
            let (up, down) = (Arc::clone(&all.up), Arc::clone(&all.down));
            std::thread::spawn(move || copy(client, server, &up, flip));
            let [client, server] = ends;
            std::thread::spawn(move || copy(server, client, &down, None));
        }
    });
    (address, recorded)
}

fn copy(mut from: TcpStream, mut to: TcpStream, all: &Mutex<Vec<u8>>, flip: Option<(usize, u8)>) {
    let (mut buffer, mut n_all) = (vec![0; 64 << 10], 0);
    while let Ok(n) = from.read(&mut buffer)
        && n > 0
    {
        let bytes = &mut buffer[..n];
        if let Some((at, bits)) = flip
            && let Some(byte) = at.checked_sub(n_all).and_then(|at| bytes.get_mut(at))
        {
            *byte ^= bits;
        }
        n_all += n;
        all.lock().unwrap().extend_from_slice(bytes);
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

fn down(mut from: impl Read, mut to: impl Write) {
    let _ = std::io::copy(&mut from, &mut to);
}
