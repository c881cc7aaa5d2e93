// SPDX-License-Identifier: Apache-2.0
//! Pulls and pushes of honest clients.

use std::sync::Arc;

use edl_core::id::Generation;
use edl_core::model::{Init, ModelSpec};
use edl_core::server::Load;
use edl_core::spec::Mode;
use edl_net::data::{Error, Limits, PsClient};
use edl_net::handshake::Encryption;
use edl_tensor::first_values;

use crate::harness::{
    By, Client, DEADLINE, N_PARTITIONS, RUN, Server, ServerPair, batch, key, layout, load_spec,
    model, shares,
};

#[test]
fn a_push_is_applied_acknowledged_and_seen_by_the_next_pull() {
    for by in By::ALL {
        let job = ServerPair::start(Mode::Async);
        let mut client = job.client(1, by);
        client.expect(0.0);
        client.push(batch(0), 1.0).unwrap();
        client.push(batch(1), 2.0).unwrap();
        assert_eq!(client.ack().unwrap(), (batch(0), 1));
        assert_eq!(client.ack().unwrap(), (batch(1), 1));
        client.expect(3.0);
        assert_eq!(client.pull(None).unwrap(), [2, 2]);
        assert_eq!(job.updates(), [2; N_PARTITIONS as usize]);
    }
}

#[test]
fn rows_are_returned_in_the_requested_order() {
    let job = ServerPair::start(Mode::Async);
    let mut client = job.client(1, By::Unix);
    let ids = vec![(0..300).rev().collect::<Vec<u64>>(), (0..40).collect()];
    let value =
        |table: usize, id: u64, column: usize| (id * 20 + column as u64 + table as u64) as f32;
    let row = |table, dim| {
        move |id: &u64| (0..dim).map(|column| -value(table, *id, column)).collect::<Vec<_>>()
    };
    let grads: Vec<Vec<f32>> = vec![
        ids[0].iter().flat_map(row(0, 2)).collect(),
        ids[1].iter().flat_map(row(1, 16)).collect(),
    ];
    let dense: Vec<f32> = (0..20).map(|n| -(n as f32)).collect();
    let base = client.net.pull(&ids, None, &mut client.rows, None).unwrap();
    client.net.push(batch(3), 7, &base, &dense, &ids, &grads).unwrap();
    client.ack().unwrap();
    let requested = vec![vec![7, 299, 0, 1000], vec![39, 3]];
    client.net.pull(&requested, Some(&mut client.dense), &mut client.rows, None).unwrap();
    assert_eq!(client.dense, (0..20).map(|n| n as f32).collect::<Vec<_>>());
    let narrow = [7, 299, 0].iter().flat_map(|id| [value(0, *id, 0), value(0, *id, 1)]);
    assert_eq!(client.rows[0], narrow.chain([0.0, 0.0]).collect::<Vec<_>>());
    let wide = [39, 3].iter().flat_map(|id| (0..16).map(|column| value(1, *id, column)));
    assert_eq!(client.rows[1], wide.collect::<Vec<_>>());
}

#[test]
fn the_same_batch_pushed_twice_counts_once() {
    let job = ServerPair::start(Mode::Async);
    let (mut ann, mut bob) = (job.client(1, By::Unix), job.client(1, By::Tcp));
    for client in [&mut ann, &mut bob] {
        for _ in 0..2 {
            client.push(batch(2), 1.0).unwrap();
            assert_eq!(client.ack().unwrap(), (batch(2), 1));
        }
    }
    ann.expect(1.0);
    assert_eq!(job.updates(), [1; N_PARTITIONS as usize]);
}

#[test]
fn a_read_creates_no_rows_and_a_pull_does() {
    let job = ServerPair::start(Mode::Async);
    let n_rows = || -> u64 {
        let states = job.servers.iter().flat_map(Server::states);
        states.map(|state| state.n_rows).sum()
    };
    let mut client = job.client(1, By::Unix);
    let Client { net, ids, dense, rows } = &mut client;
    net.read(ids, Some(dense), rows).unwrap();
    assert_eq!(n_rows(), 0);
    net.pull(ids, None, rows, None).unwrap();
    assert_eq!(n_rows(), 105);
}

#[test]
fn a_different_generation_is_refused_by_name_and_changes_nothing() {
    let job = ServerPair::start(Mode::Async);
    job.load(2, Mode::Async);
    let mut client = job.client(1, By::Unix);
    let over = |error: &Error| matches!(error, Error::Generation { ours, theirs } if ours.0 == 1 && theirs.0 == 2);
    let refused = client.pull(None).unwrap_err();
    assert!(over(&refused), "{refused}");
    client.push(batch(0), 1.0).unwrap();
    let refused = client.ack().unwrap_err();
    assert!(over(&refused), "{refused}");
    job.client(2, By::Unix).expect(0.0);
    assert_eq!(job.updates(), [0; N_PARTITIONS as usize]);
}

#[test]
fn a_zombie_connection_is_refused_after_the_next_generation_was_loaded() {
    let job = ServerPair::start(Mode::Async);
    let mut zombie = job.client(1, By::Tcp);
    zombie.push(batch(0), 1.0).unwrap();
    zombie.ack().unwrap();
    job.load(2, Mode::Async);
    zombie.push(batch(1), 1.0).unwrap();
    assert!(matches!(zombie.ack(), Err(Error::Generation { .. })));
    assert!(matches!(zombie.pull(None), Err(Error::Generation { .. })));
    // The new generation has the initial values, unchanged.
    job.client(2, By::Tcp).expect(0.0);
    assert_eq!(job.updates(), [0; N_PARTITIONS as usize]);
}

#[test]
fn loading_the_current_generation_loses_nothing_and_an_older_one_is_refused() {
    let job = ServerPair::start(Mode::Async);
    let mut client = job.client(1, By::Unix);
    client.push(batch(0), 1.0).unwrap();
    client.ack().unwrap();
    job.load(1, Mode::Async);
    client.expect(1.0);
    job.load(3, Mode::Async);
    let older = load_spec(2, 0..2, Mode::Async);
    let refused = job.servers[0].load(older).unwrap_err();
    assert_eq!(refused, "generation 2 is outdated: this server is at generation 3");
}

#[test]
fn a_checkpoint_restores_rows_and_applied_sets_on_a_different_number_of_servers() {
    let job = ServerPair::start(Mode::Async);
    let mut client = job.client(1, By::Unix);
    for index in 0..3 {
        client.push(batch(index), 1.0).unwrap();
        client.ack().unwrap();
    }
    let folder = job.folder.path().join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    let files = job.servers.iter().flat_map(|server| {
        server.order_checkpoint(1, &folder, None);
        server.checkpointed(1).unwrap()
    });
    crate::harness::commit(&folder, files.collect());

    let alone = Server::start(job.folder.path(), 9);
    let mut load = load_spec(2, 0..N_PARTITIONS, Mode::Async);
    load.from.checkpoint = Some(folder.to_str().unwrap().into());
    alone.load(load).unwrap();
    alone.serve(Generation(2));
    let mut route = job.route(2, By::Unix);
    route.servers.truncate(1);
    route.servers[0].partitions = 0..N_PARTITIONS;
    route.servers[0].unix_path = alone.unix_path.to_str().unwrap().into();
    let mut client = Client::connect(&route).unwrap();
    client.expect(3.0);
    let base = edl_net::data::Versions(vec![3]);
    for index in 0..4 {
        client.push_from(batch(index), 1.0, &base).unwrap();
        client.ack().unwrap();
    }
    client.expect(4.0);
}

#[test]
fn an_incomplete_route_is_refused_before_anything_is_sent() {
    let job = ServerPair::start(Mode::Async);
    let mut route = job.route(1, By::Unix);
    route.servers[1].partitions = 3..N_PARTITIONS;
    let refused = PsClient::connect(
        &route,
        (&key(), RUN, Encryption::default()),
        layout(),
        &model(),
        Limits::all(DEADLINE),
    );
    assert!(matches!(refused.map(|_| ()), Err(Error::Refused(_))));
}

#[test]
fn a_route_that_contradicts_the_servers_is_refused_and_changes_nothing() {
    let job = ServerPair::start(Mode::Async);
    let mut route = job.route(1, By::Unix);
    route.servers[0].partitions = 0..3;
    route.servers[1].partitions = 3..N_PARTITIONS;
    let mut client = Client::connect(&route).unwrap();
    let refused = client.pull(None).unwrap_err().to_string();
    assert_eq!(refused, "refused: requested partitions 0..3; this server holds 0..2");
    client.push(batch(0), 1.0).unwrap();
    assert!(matches!(client.ack(), Err(Error::Refused(_))));
    assert_eq!(job.updates(), [0; N_PARTITIONS as usize]);
}

#[test]
fn a_client_uses_tcp_despite_a_stale_socket_file() {
    let job = ServerPair::start(Mode::Async);
    let mut route = job.route(1, By::Unix);
    let stale = job.folder.path().join("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    route.servers[0].unix_path = stale.to_str().unwrap().into();
    Client::connect(&route).unwrap().expect(0.0);
}

#[test]
fn parameters_start_from_the_initial_values_of_the_model() {
    let job = ServerPair::start(Mode::Async);
    let job_dir = job.folder.path();
    let load = |change: &dyn Fn(&mut ModelSpec)| {
        let mut given = model();
        given.params[0].init = Init::Given;
        change(&mut given);
        for (server, partitions) in job.servers.iter().zip(shares()) {
            let model = Arc::new(given.clone());
            let spec = load_spec(2, partitions, Mode::Async);
            server.load(Load { model, ..spec })?;
            server.serve(Generation(2));
        }
        Ok::<(), String>(())
    };
    let missing = load(&|_| {}).unwrap_err();
    assert!(missing.contains(first_values::FILE), "{missing}");
    let refused = load(&|model| model.tables[1].init = Init::Given).unwrap_err();
    assert!(refused.contains(first_values::FILE), "{refused}");

    let values: Vec<f32> = (0..20_u8).map(|n| f32::from(n) / 3.0).collect();
    assert!(first_values::write(job_dir, &values[1..]).unwrap());
    let unfit = load(&|_| {}).unwrap_err();
    assert!(unfit.contains("19 initial values, but the model has 20 parameters"), "{unfit}");
    std::fs::remove_file(job_dir.join(first_values::FILE)).unwrap();
    assert!(first_values::write(job_dir, &values).unwrap());
    load(&|_| {}).unwrap();
    let mut client = job.client(2, By::Unix);
    client.pull(None).unwrap();
    assert_eq!(client.dense, values);
    client.push(batch(0), 1.0).unwrap();
    client.ack().unwrap();
    client.pull(None).unwrap();
    assert_eq!(client.dense, values.iter().map(|value| value + 1.0).collect::<Vec<_>>());
}
