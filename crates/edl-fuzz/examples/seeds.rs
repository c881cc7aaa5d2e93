// SPDX-License-Identifier: Apache-2.0
//! Writes the seeds that only a program can write: `cargo run -p edl-fuzz --example seeds`. The others,
//! and inputs that once failed, are written manually.
#![expect(clippy::unwrap_used, reason = "a tool for developers, like a test")]

use std::fs;
use std::io::Write as _;
use std::sync::Arc;

use edl_core::applied::AppliedSet;
use edl_core::id::{BatchId, CheckpointId, Generation, PartitionId, Term};
use edl_core::layout::Layout;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::{OptimizerKind, OptimizerSpec};
use edl_core::spec::Mode;
use edl_data::example::Example;
use edl_data::tfrecord;
use edl_fuzz::Target;
use edl_image::image::{self, Config};
use edl_image::layer::{self, Entry};
use edl_image::reference::Reference;
use edl_image::store::Store;
use edl_kube::yaml;
use edl_net::proto::{self, ps_command, ps_message, worker_command, worker_message};
// The fake cluster is the operator's own; it finds these modules as it does there.
use edl_operator::{act, crd, observe};
use edl_tensor::checkpoint::{self, FileEntry, Manifest, codec};
use edl_tensor::partition::{Partition, PartitionConfig};
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::basic::{Compression as Packing, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, FloatType, Int32Type, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use prost::Message;
use serde_json::json;

#[expect(dead_code, reason = "unit tests use the rest")]
#[path = "../../edl-operator/src/tests/fake_cluster.rs"]
mod fake_cluster;

fn main() {
    records();
    tables();
    control_messages();
    checkpoints();
    images();
    programs();
    clusters();
}

fn write(target: &str, name: &str, bytes: impl AsRef<[u8]>) {
    let folder = Target::find(target).unwrap().corpus();
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(name), bytes).unwrap();
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

fn records() {
    let example = Example::new().ints("label", [3]).floats("x", [0.5, -1.0]).bytes("name", "red");
    let mut file = Vec::new();
    for record in [example.to_bytes(), Vec::new(), example.to_bytes()] {
        tfrecord::write(&mut file, &record).unwrap();
    }
    write("tfrecord", "three", file);
    let idx = |code: u8, sizes: &[u8], values: &[u8]| {
        let mut bytes = vec![0, 0, code, u8::try_from(sizes.len()).unwrap()];
        sizes.iter().for_each(|size| bytes.extend([0, 0, 0, *size]));
        bytes.extend(values);
        bytes
    };
    let images = idx(0x08, &[2, 2, 2], &[0, 1, 2, 3, 4, 5, 6, 255]);
    write("idx", "gzip", gzip(&images));
    write("idx", "bytes", images);
    write("idx", "floats", idx(0x0d, &[1], &[0x3f, 0x80, 0, 0]));
    write("idx", "doubles", idx(0x0e, &[1], &[0x3f, 0xf0, 0, 0, 0, 0, 0, 0]));
    write("idx", "shorts", idx(0x0b, &[2], &[1, 0, 255, 255]));
    write("idx", "gzip-zeros", gzip(&idx(0x08, &[200], &[0; 200])));
}

const SCHEMA: &str = "message table {
    required int64 id;
    optional float score;
    optional binary word (UTF8);
    optional group pixels (LIST) { repeated group list { optional int32 element; } }
}";

fn tables() {
    let packings = [
        ("plain", Packing::UNCOMPRESSED),
        ("snappy", Packing::SNAPPY),
        ("gzip", Packing::GZIP(Default::default())),
        ("brotli", Packing::BROTLI(Default::default())),
        ("zstd", Packing::ZSTD(ZstdLevel::default())),
    ];
    for (name, packing) in packings {
        let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
        let properties = WriterProperties::builder().set_compression(packing).build();
        let mut writer =
            SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties)).unwrap();
        let mut rows = writer.next_row_group().unwrap();
        macro_rules! column {
            ($type:ty, $values:expr, $defs:expr, $reps:expr) => {{
                let mut column = rows.next_column().unwrap().unwrap();
                column.typed::<$type>().write_batch($values, $defs, $reps).unwrap();
                column.close().unwrap();
            }};
        }
        let words = [ByteArray::from("red"), ByteArray::from("blue")];
        column!(Int64Type, &[1, -2, 3], None, None);
        column!(FloatType, &[0.5, 2.5], Some(&[1, 0, 1]), None);
        column!(ByteArrayType, &words, Some(&[1, 1, 0]), None);
        column!(Int32Type, &[7, 8, 9], Some(&[3, 3, 3, 2, 0]), Some(&[0, 1, 0, 1, 0]));
        rows.close().unwrap();
        write("parquet", name, writer.into_inner().unwrap());
    }
}

fn sets() -> Vec<AppliedSet> {
    let mut set = AppliedSet::of_first(7, 5);
    set.insert(BatchId { epoch: 1, index: 4 });
    set.insert(BatchId { epoch: 3, index: 1 });
    vec![AppliedSet::new(5), AppliedSet::of_first(6, 5), set]
}

fn control_messages() {
    for (name, set) in ["empty", "first", "gaps"].into_iter().zip(sets()) {
        write("applied", name, set.to_bytes(None));
    }
    let mut bits = Vec::new();
    [5_u32, 1, 1, 1, 0b10110, 0].iter().for_each(|word| bits.extend(word.to_le_bytes()));
    write("applied", "bits", bits);
    let mut before: Option<AppliedSet> = None;
    let part = |(set, partition): (AppliedSet, u32)| {
        let applied = set.to_bytes(before.as_ref());
        before = Some(set);
        proto::PartitionSet { partition, applied, updates: 7, n_rows: 1 }
    };
    let sets: Vec<_> = sets().into_iter().zip(0..).map(part).collect();
    let ps = |name: &str, kind| {
        write("ps_message", name, proto::PsMessage { kind: Some(kind) }.encode_to_vec());
    };
    let hello = proto::PsHello { ps: 1, generation: 2, sets: sets.clone(), ..Default::default() };
    ps("hello", ps_message::Kind::Hello(hello));
    ps("loaded", ps_message::Kind::Loaded(proto::Loaded { generation: 2, sets: sets.clone() }));
    ps("sets", ps_message::Kind::Sets(proto::Sets { request: 9, generation: 2, sets }));
    let spent = Some(proto::Spent::default());
    let spending = proto::Spending { spent, last: 1, step: 3, ..Default::default() };
    ps("spending", ps_message::Kind::Spending(spending));
    let files = vec![proto::CheckpointFile { name: "a".into(), bytes: 9, ..Default::default() }];
    let done = proto::CheckpointDone { checkpoint: 3, generation: 2, files };
    ps("checkpoint-done", ps_message::Kind::CheckpointDone(done.clone()));

    let worker = |name: &str, kind| {
        write("worker_message", name, proto::WorkerMessage { kind: Some(kind) }.encode_to_vec());
    };
    let model_spec_json = serde_json::to_string(&model()).unwrap();
    let held = vec![proto::HeldLease { lease: 4, generation: 1, epoch: 1, indices: vec![2, 3] }];
    let peer = Some(proto::Peer { address: "host:1".into(), step: Some(5), ..Default::default() });
    let ready = proto::Ready { model_spec_json: model_spec_json.clone(), capacity: 2, held, peer };
    worker("ready", worker_message::Kind::Ready(ready));
    let loss = 0.5;
    let batch = proto::BatchDone { epoch: 1, index: 2, generation: 3, loss };
    worker("batch-done", worker_message::Kind::BatchDone(batch));
    let measures = vec![proto::Sums { name: "loss".into(), kind: 0, sums: vec![1.0, 2.0] }];
    let eval = proto::EvalDone { eval: 1, measures, ..Default::default() };
    worker("eval-done", worker_message::Kind::EvalDone(eval));
    worker("spending", worker_message::Kind::Spending(spending));
    worker("checkpoint-done", worker_message::Kind::CheckpointDone(done));
    let stepped = proto::Stepped { world: 1, step: 2, hash: 3, loss };
    worker("stepped", worker_message::Kind::Stepped(stepped));
    let chaos = proto::ChaosRequest { role: 1, id: 0, how: 1, ..Default::default() };
    write("worker_message", "chaos", chaos.encode_to_vec());
    commands(model_spec_json);
}

fn commands(model_spec_json: String) {
    let command = |name: &str, kind| {
        write("command", name, proto::WorkerCommand { kind: Some(kind) }.encode_to_vec());
    };
    let server =
        proto::Server { ps: 0, address: "host:1".into(), end_partition: 4, ..Default::default() };
    let route = proto::Route { generation: 2, servers: vec![server] };
    command("route", worker_command::Kind::Route(route));
    let train = proto::TrainWork { epoch: 1, first: 2, count: 3, skipped: vec![2] };
    let work = Some(proto::lease::Work::Train(train));
    command("lease", worker_command::Kind::Lease(proto::Lease { lease: 1, work }));
    let member = proto::Member { worker: 3, address: "host:1".into(), ..Default::default() };
    let world = proto::World { world: 7, members: vec![member], until: 8, ..Default::default() };
    command("world", worker_command::Kind::World(world.clone()));
    let changes = proto::Changes {
        base: 7,
        first: 3,
        lanes: 4,
        lane_counts: vec![4],
        stateless: vec![3],
        ..Default::default()
    };
    let world = proto::World { changes: Some(changes), ..world };
    command("world_changes", worker_command::Kind::World(world));
    let optimizer_json = serde_json::to_string(&OptimizerSpec::sgd(0.1)).unwrap();
    let load = proto::Load {
        generation: 2,
        model_spec_json,
        optimizer_json,
        n_partitions: 4,
        n_batches: 7,
        ..Default::default()
    };
    let load = proto::PsCommand { kind: Some(ps_command::Kind::Load(load)) };
    write("command", "load", load.encode_to_vec());
}

fn model() -> ModelSpec {
    let init = Init::Uniform { low: -1.0, high: 1.0 };
    let rule = Rule::Trainable { decay: true };
    ModelSpec {
        name: "seed".into(),
        params: vec![ParamSpec::new("w", vec![2, 3], init, rule)],
        tables: vec![TableSpec { name: "t".into(), dim: 2, init }],
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: OptimizerSpec::sgd(0.1),
    }
}

fn checkpoints() {
    let kind = OptimizerKind::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false };
    let optimizers = [("sgd", OptimizerSpec::sgd(0.1)), ("adam", OptimizerSpec::new(kind, 0.1))];
    for (name, optimizer) in optimizers {
        let model = model();
        let layout = Layout::shared(model.dense_len(), 1);
        let (mode, n_batches) = (Mode::Async, 5);
        let mut partition = Partition::new(PartitionConfig {
            id: PartitionId(0),
            layout,
            model: Arc::new(model.clone()),
            optimizer: optimizer.clone(),
            seed: 1,
            n_batches,
            mode,
            lr_staleness_modulation: false,
        });
        partition.gather(0, &[3, 9], &mut [0.0; 4]);
        let mut bytes = Vec::new();
        codec::encode(&partition.snapshot(), &mut bytes).unwrap();
        let file = FileEntry {
            partition: PartitionId(0),
            name: checkpoint::file_name(PartitionId(0)),
            bytes: bytes.len() as u64,
            checksum: "00".repeat(32),
            updates: 0,
        };
        write("partition", name, bytes);
        let manifest = Manifest {
            format: checkpoint::FORMAT,
            version: 3,
            exact: Some(3),
            generation: Generation(2),
            checkpoint: CheckpointId(1),
            term: Term(1),
            run: "07".repeat(16),
            job: "a".into(),
            seed: 1,
            model,
            optimizer,
            n_batches,
            n_partitions: 1,
            fingerprint: "f".into(),
            files: vec![file],
            metrics: [("loss".to_owned(), 0.5)].into(),
            skipped: [BatchId { epoch: 0, index: 1 }].into(),
        };
        write("manifest", name, serde_json::to_vec(&manifest).unwrap());
    }
}

fn tar(entries: &[(&str, tar::EntryType, &str)]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, kind, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        if *kind == tar::EntryType::Symlink {
            header.set_size(0);
            tar.append_link(&mut header, path, content).unwrap();
        } else {
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, path, content.as_bytes()).unwrap();
        }
    }
    tar.into_inner().unwrap()
}

fn images() {
    use tar::EntryType::{Directory, Regular, Symlink};
    let long = "a/".repeat(80) + "long";
    let layer = tar(&[
        ("usr/lib/", Directory, ""),
        ("lib", Symlink, "usr/lib"),
        ("lib/.wh.old", Regular, ""),
        (long.as_str(), Regular, "content"),
    ]);
    write("layer", "gzip", gzip(&layer));
    write("layer", "tar", layer);

    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let entries = vec![Entry::bytes("a", 0o644, "content")];
    let layer = layer::write(&store, &edl_image::base::Paths::default(), entries).unwrap();
    let mut config = Config::empty();
    config.rootfs.diff_ids.push(layer.diff_id.clone());
    let json = serde_json::to_vec(&config).unwrap();
    let config = store.put_json(image::CONFIG, &config).unwrap();
    let descriptor = store.put_manifest(config, vec![layer.blob]).unwrap();
    let file = dir.path().join("image.tar");
    edl_image::archive::write(&store, &Reference::parse("a:1").unwrap(), &descriptor, &file)
        .unwrap();
    write("archive", "oci", fs::read(file).unwrap());
    let plain = tar(&[("a", Regular, "content")]);
    let mut old = Config::empty();
    old.rootfs.diff_ids.push(edl_image::digest::Digest::of(&plain));
    let old = serde_json::to_string(&old).unwrap();
    let list = r#"[{"Config":"c.json","RepoTags":["a:1"],"Layers":["l.tar"]}]"#;
    let plain = String::from_utf8(plain).unwrap();
    let entries = [
        ("manifest.json", Regular, list),
        ("c.json", Regular, old.as_str()),
        ("l.tar", Regular, plain.as_str()),
    ];
    write("archive", "docker", tar(&entries));

    write("registry", "config", json);
    write("registry", "manifest", store.read(&descriptor.digest).unwrap());
    let index = json!({"schemaVersion": 2, "manifests": [descriptor]});
    write("registry", "index", index.to_string());
}

/// A 64-bit program of nothing but headers: its loader, its libraries, and where they are looked for.
fn programs() {
    let names = b"\0libc.so.6\0/opt/lib:/usr/lib\0";
    let loader = b"/lib64/ld.so\0";
    let (phdrs, n_phdrs) = (64_u64, 3_u64);
    let loader_at = phdrs + 56 * n_phdrs;
    let dynamic_at = (loader_at + loader.len() as u64).next_multiple_of(8);
    let dynamic = [(1_u64, 1_u64), (29, 11), (5, 0), (10, names.len() as u64), (0, 0)];
    let names_at = dynamic_at + 16 * dynamic.len() as u64;
    let len = names_at + names.len() as u64;
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    bytes.extend([3_u8, 0, 62, 0, 1, 0, 0, 0]);
    for word in [0, phdrs, 0] {
        bytes.extend(u64::to_le_bytes(word));
    }
    for half in [0_u16, 0, 64, 56, 3, 64, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    let mut segment = |kind: u32, at: u64, size: u64| {
        bytes.extend(kind.to_le_bytes());
        bytes.extend(5_u32.to_le_bytes());
        for word in [at, at, at, size, size, 8] {
            bytes.extend(word.to_le_bytes());
        }
    };
    segment(1, 0, len);
    segment(3, loader_at, loader.len() as u64);
    segment(2, dynamic_at, 16 * dynamic.len() as u64);
    bytes.extend(loader);
    bytes.resize(usize::try_from(dynamic_at).unwrap(), 0);
    for (tag, value) in dynamic {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(if tag == 5 { names_at } else { value }.to_le_bytes());
    }
    bytes.extend(names);
    let needs = edl_image::elf::needs(&bytes).unwrap();
    assert_eq!(needs.libraries, ["libc.so.6"]);
    write("program", "dynamic", &bytes);
    bytes.extend([0; 64]);
    write("program", "with-sections", bytes);
}

fn clusters() {
    let nodes = ["n1", "n2"].map(|name| fake_cluster::node(name, "4", "16Gi"));
    let limits = json!({"min_workers": 1, "max_workers": 3});
    let jobs = ["a", "b"].map(|name| fake_cluster::job(name, &limits));
    let mut cluster = fake_cluster::FakeCluster::new(&nodes, &jobs);
    cluster.objects.pods.push(fake_cluster::other_pod("web", "2", None).into());
    for name in ["submitted", "running"] {
        let objects = &cluster.objects;
        let text = json!({
            "nodes": plain(&objects.nodes), "pods": plain(&objects.pods),
            "jobs": plain(&objects.jobs), "config_maps": plain(&objects.config_maps),
        });
        write("cluster", name, yaml::write(&text).unwrap());
        cluster.pass();
        cluster.settle();
    }
}

fn plain<T>(objects: &[Arc<T>]) -> Vec<&T> {
    objects.iter().map(|object| &**object).collect()
}
