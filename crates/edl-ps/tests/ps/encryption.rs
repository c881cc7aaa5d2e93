// SPDX-License-Identifier: Apache-2.0
//! Encrypted connections: what a man in the middle can see and change, and how peers agree on them.

use edl_core::spec::Mode;
use edl_net::data::{Error, Route};
use edl_net::frame::HEADER_LEN;
use edl_net::handshake::{Encryption, Hello};

use crate::harness::{By, Client, ServerPair, batch};
use crate::relay::{self, Recorded};

/// The length of what a client sends before its first pull or push: its hello and its proof.
const HANDSHAKE: usize = HEADER_LEN + Hello::LEN + HEADER_LEN + 32;

/// The route to the servers, with a relay in front of the first.
fn relayed(job: &ServerPair, flip: Option<(usize, u8)>) -> (Route, Recorded) {
    let mut route = job.route(1, By::Tcp);
    let (address, recorded) = relay::record(&route.servers[0].address, flip);
    route.servers[0].address = address;
    (route, recorded)
}

#[test]
fn an_eavesdropper_cannot_read_gradients_or_parameters() {
    for (encryption, is_readable) in [(Encryption::Always, false), (Encryption::Never, true)] {
        let job = ServerPair::start(Mode::Async);
        let (route, recorded) = relayed(&job, None);
        let mut client = Client::connect_as(&route, encryption).unwrap();
        client.push(batch(0), 0.731).unwrap();
        client.ack().unwrap();
        client.expect(0.731);
        let bytes = |value: f32| [value; 4].iter().flat_map(|float| float.to_le_bytes()).collect();
        let (gradient, parameters): (Vec<u8>, Vec<u8>) = (bytes(-0.731), bytes(0.731));
        assert_eq!(recorded.contains(&gradient), (is_readable, false));
        assert_eq!(recorded.contains(&parameters), (false, is_readable));
        // Frame headers are readable only in the handshakes of both connections.
        let up = recorded.up.lock().unwrap();
        let n_headers = up.windows(4).filter(|part| part == b"EDLF").count();
        assert_eq!(n_headers, if is_readable { 6 } else { 4 });
    }
}

#[test]
fn a_changed_byte_of_an_encrypted_frame_ends_the_connection_and_applies_nothing() {
    for at in [0, 6, 32, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 100, HEADER_LEN + 2000] {
        let job = ServerPair::start(Mode::Async);
        let (route, _) = relayed(&job, Some((HANDSHAKE + at, 1)));
        let mut client = Client::connect_as(&route, Encryption::Always).unwrap();
        client.push(batch(0), 1.0).unwrap();
        assert!(matches!(client.ack(), Err(Error::Closed)), "{at}");
        let states = job.servers[0].states();
        assert!(states.iter().all(|state| state.updates == 0 && state.n_rows == 0), "{at}");
    }
}

#[test]
fn a_man_in_the_middle_cannot_turn_encryption_off() {
    // Changes "requires" to "accepts", "requires" to "refuses", and "accepts" to "refuses".
    for (encryption, bits) in
        [(Encryption::Always, 3), (Encryption::Always, 2), (Encryption::BetweenHosts, 1)]
    {
        let job = ServerPair::start(Mode::Async);
        let (route, _) = relayed(&job, Some((HEADER_LEN + 1, bits)));
        let refused = Client::connect_as(&route, encryption).map(|_| ());
        let Err(Error::Refused(text)) = refused else { panic!("{refused:?}") };
        assert_eq!(text, "the server does not have this job's key");
    }
}

#[test]
fn a_side_that_requires_encryption_refuses_a_peer_that_has_it_off() {
    for (server, client) in
        [(Encryption::Never, Encryption::Always), (Encryption::Always, Encryption::Never)]
    {
        let job = ServerPair::start_with(Mode::Async, server);
        let (by_tcp, by_unix) = (job.route(1, By::Tcp), job.route(1, By::Unix));
        let Err(Error::Refused(text)) = Client::connect_as(&by_tcp, client).map(|_| ()) else {
            panic!("connected although one side requires encryption");
        };
        assert!(!text.contains('\n'), "{text}");
        let [first, second] = ["requires encrypted data connections, but", "set to false"]
            .map(|part| text.find(part).unwrap_or_else(|| panic!("{text}")));
        let named = text.find(&by_tcp.servers[0].address).unwrap_or_else(|| panic!("{text}"));
        let requires = named < first;
        assert_eq!(requires, server == Encryption::Always, "{text}");
        assert!(first < second && text.matches("127.0.0.1:").count() == 2, "{text}");
        // Unix sockets are not encrypted, so there is no conflict.
        Client::connect_as(&by_unix, client).unwrap().expect(0.0);
    }
}

#[test]
fn encrypted_frames_of_many_chunks_carry_the_same_numbers() {
    let value = |id: u64, column: usize| (id * 16 + column as u64) as f32;
    let ids = vec![Vec::new(), (0..30_000).rev().collect::<Vec<u64>>()];
    let grads: Vec<f32> =
        ids[1].iter().flat_map(|id| (0..16).map(|column| -value(*id, column))).collect();
    for by in By::ALL {
        let job = ServerPair::start(Mode::Async);
        let mut client = job.client(1, by);
        let base = client.net.pull(&ids, None, &mut client.rows, None).unwrap();
        let grads = [Vec::new(), grads.clone()];
        client.net.push(batch(0), 1, &base, &[-1.0; 20], &ids, &grads).unwrap();
        client.ack().unwrap();
        client.net.pull(&ids, Some(&mut client.dense), &mut client.rows, None).unwrap();
        let expected: Vec<f32> = grads[1].iter().map(|grad| -grad).collect();
        assert!(client.rows[1] == expected, "{by:?}");
        assert_eq!(client.dense, vec![1.0; 20]);
    }
}
