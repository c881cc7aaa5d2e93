// SPDX-License-Identifier: Apache-2.0
//! Steps with lanes, over real sockets: rows of a step, checkpoints of a step.

use edl_core::id::{Generation, PsId, WorldId};
use edl_core::layout::Layout;
use edl_core::server::{self, Load};
use edl_core::spec::Mode;
use edl_net::data::{Error, Limits, PsClient, Route, ServerRoute};
use edl_net::handshake::Encryption;
use edl_tensor::push::Lane;

use crate::harness::{DEADLINE, N_PARTITIONS, RUN, Server, batch, key, load_spec, model};

const GENERATION: Generation = Generation(1);

/// Two servers that hold only rows.
struct ServerPair {
    servers: [Server; 2],
    folder: tempfile::TempDir,
}

fn layout() -> Layout {
    Layout::apart(20, N_PARTITIONS)
}

impl ServerPair {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let servers = [0, 1].map(|ps| Server::start(folder.path(), ps));
        for (ps, server) in (0..).zip(&servers) {
            let hosted = layout().hosted(PsId(ps), 2);
            let spec = load_spec(GENERATION.0, hosted, Mode::Steps { lanes: 2 });
            server.load(Load { layout: layout(), ..spec }).unwrap();
            server.serve(GENERATION);
        }
        Self { servers, folder }
    }

    fn client(&self) -> Client {
        let server = |(ps, server): (u32, &Server)| ServerRoute {
            ps: PsId(ps),
            address: server.address.clone(),
            unix_path: server.unix_path.to_str().unwrap().to_owned(),
            partitions: layout().hosted(PsId(ps), 2),
        };
        let servers = (0..).zip(&self.servers).map(server).collect();
        let route = Route { generation: GENERATION, servers };
        let net = PsClient::connect(
            &route,
            (&key(), RUN, Encryption::default()),
            layout(),
            &model(),
            Limits::all(DEADLINE),
        )
        .unwrap();
        Client { net, ids: vec![vec![5, 1, 900, 17, 4], (0..100).map(|id| id * 7).collect()] }
    }
}

struct Client {
    net: PsClient,
    ids: Vec<Vec<u64>>,
}

impl Client {
    /// Pushes minus `value` for one of two lanes with ten records each.
    fn push(&mut self, index: u32, number: u32, value: f32) -> Result<(), Error> {
        let lane = Lane { world: WorldId(1), number, of: 2 };
        let dims = [2, 16];
        let grads: Vec<Vec<f32>> =
            self.ids.iter().zip(dims).map(|(ids, dim)| vec![-value; ids.len() * dim]).collect();
        self.net.push_lane(batch(index), lane, 10, &self.ids, &grads)?;
        self.net.acks().recv_timeout(DEADLINE).expect("an answer in time").map(drop)
    }

    fn step(&mut self, index: u32) {
        self.push(index, 0, 1.0).unwrap();
        self.push(index, 1, 3.0).unwrap();
    }

    /// The value of all rows after `step` steps.
    fn read(&mut self, step: u64) -> Result<f32, Error> {
        let mut rows = vec![Vec::new(); 2];
        self.net.read_at(step, &self.ids, &mut rows)?;
        let first = rows[0][0];
        assert!(rows.iter().flatten().all(|number| number.to_bits() == first.to_bits()));
        Ok(first)
    }
}

#[test]
#[expect(clippy::float_cmp, reason = "small sums are exact")]
fn a_staged_lane_is_acknowledged_and_rows_are_readable_before_and_after_the_step() {
    let job = ServerPair::start();
    let (mut ann, mut bob) = (job.client(), job.client());
    ann.push(0, 0, 1.0).unwrap();
    assert_eq!(ann.read(0).unwrap(), 0.0, "half a step is not applied");
    bob.push(0, 1, 3.0).unwrap();
    assert_eq!((bob.read(1).unwrap(), ann.read(0).unwrap()), (2.0, 0.0), "before and after");
    ann.push(0, 0, 1.0).unwrap();
    assert_eq!(ann.read(1).unwrap(), 2.0, "a repeated lane changes nothing");
    bob.step(1);
    assert_eq!((bob.read(2).unwrap(), bob.read(1).unwrap()), (4.0, 2.0));
    for step in [0, 3] {
        let mismatch = ann.read(step).unwrap_err();
        assert!(matches!(mismatch, Error::StepMismatch(_)), "{mismatch}");
    }
    assert_eq!(ann.read(2).unwrap(), 4.0, "the connection still works");
}

#[test]
fn a_checkpoint_waits_for_its_step_and_a_later_order_replaces_it() {
    let job = ServerPair::start();
    let mut client = job.client();
    let [first, second] = &job.servers;
    let folder = |name: &str| job.folder.path().join(name);
    first.order_checkpoint(1, &folder("first"), Some(2));
    client.step(0);
    client.step(1);
    let files = first.checkpointed(1).unwrap();
    assert!(files.len() == 3 && files.iter().all(|file| file.updates == 2));

    first.order_checkpoint(2, &folder("late"), Some(9));
    first.order_checkpoint(3, &folder("again"), Some(2));
    let error = first.checkpointed(2).unwrap_err();
    assert_eq!(error, server::Error::Overtaken.to_string());
    first.checkpointed(3).unwrap();

    second.order_checkpoint(4, &folder("past"), Some(1));
    let past = second.checkpointed(4).unwrap_err();
    assert!(past.starts_with("step 1 has passed") && past.ends_with("is at step 2"), "{past}");
    second.order_checkpoint(5, &folder("now"), Some(2));
    let now = second.checkpointed(5).unwrap();
    assert!(now.len() == 3 && now.iter().all(|file| file.updates == 2));
}
