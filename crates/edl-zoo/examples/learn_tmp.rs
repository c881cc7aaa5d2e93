//! Temporary.
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use edl_core::batch::BatchPlan;
use edl_core::id::{BatchId, PartitionId};
use edl_core::layout::Layout;
use edl_core::metric::Measures;
use edl_core::spec::{JobSpec, Mode};
use edl_tensor::batch::{Batch, Column};
use edl_tensor::model::{Gradient, Inputs};
use edl_tensor::partition::{Partition, PartitionConfig};
use edl_tensor::push::{Body, Head, Push};

struct Data { images: Option<(Vec<u8>, Vec<u8>)>, people: Vec<Vec<String>> }
impl Data {
    fn open(kind: &str, part: &str) -> Self {
        if kind.starts_with("mnist") {
            Self { images: Some((std::fs::read(format!("/tmp/zoo-fm-{part}.img")).unwrap(), std::fs::read(format!("/tmp/zoo-fm-{part}.lab")).unwrap())), people: vec![] }
        } else {
            let t = std::fs::read_to_string(format!("/tmp/zoo-census-{part}.tsv")).unwrap();
            Self { images: None, people: t.lines().map(|l| l.split('\t').map(Into::into).collect()).collect() }
        }
    }
    fn len(&self) -> u64 { self.images.as_ref().map_or(self.people.len(), |i| i.1.len()) as u64 }
    fn batch(&self, records: Vec<u64>) -> Batch {
        let n = records.len();
        let mut columns = BTreeMap::new();
        if let Some((img, lab)) = &self.images {
            let values = records.iter().flat_map(|r| img[*r as usize * 784..][..784].to_vec()).collect();
            columns.insert("image".to_owned(), Column::U8 { shape: vec![n, 28, 28], values });
            columns.insert("label".to_owned(), Column::I64 { shape: vec![n], values: records.iter().map(|r| i64::from(lab[*r as usize])).collect() });
        } else {
            let num = ["age","fnlwgt","education_num","capital_gain","capital_loss","hours_per_week","label"];
            let word = ["workclass","education","marital_status","occupation","relationship","race","gender","native_country"];
            for (i, name) in num.iter().enumerate() {
                let col = records.iter().map(|r| self.people[*r as usize][i].clone());
                let c = if *name == "label" { Column::I64 { shape: vec![n], values: col.map(|v| v.parse().unwrap()).collect() } } else { Column::F32 { shape: vec![n], values: col.map(|v| v.parse().unwrap()).collect() } };
                columns.insert((*name).to_owned(), c);
            }
            for (i, name) in word.iter().enumerate() {
                columns.insert((*name).to_owned(), Column::Bytes(records.iter().map(|r| self.people[*r as usize][7 + i].clone().into_bytes()).collect()));
            }
        }
        Batch { records, columns }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (name, limit, epochs, delay): (String, u64, u32, usize) = (args[1].clone(), args[2].parse().unwrap(), args[3].parse().unwrap(), args[4].parse().unwrap());
    let spec = JobSpec { model_def: name.clone(), optimizer: args.get(5).cloned(), learning_rate: args.get(6).map(|t| t.parse().unwrap()), ..JobSpec::default() };
    let mut model = edl_zoo::open(&spec).unwrap();
    let mut ms = model.spec().clone();
    if let Some(g) = args.get(7) { for p in &mut ms.params { if p.name.ends_with("gamma") { p.init = edl_core::model::Init::Constant(g.parse().unwrap()); } } }
    let ms = Arc::new(ms);
    let (train, test) = (Data::open(&name, "train"), Data::open(&name, "test"));
    let n = train.len().min(limit);
    let plan = BatchPlan { n_records: n, minibatch_size: 64, batches_per_shard: 8, seed: 1, shuffle: true };
    let layout = Layout { dense_len: ms.dense_len(), n_partitions: 1 };
    let mut part = Partition::new(PartitionConfig { id: PartitionId(0), layout, model: ms.clone(), optimizer: edl_zoo::optimizer(&spec, &ms).unwrap(), seed: 1, n_batches: plan.n_batches(), mode: Mode::Async, lr_staleness_modulation: false });
    let dims: Vec<usize> = ms.tables.iter().map(|t| t.dim).collect();
    let mut queue: VecDeque<Arc<Push>> = VecDeque::new();
    let mut losses: Vec<f32> = vec![];
    let t0 = std::time::Instant::now();
    for epoch in 0..epochs {
        for index in 0..plan.n_batches() {
            let id = BatchId { epoch, index };
            let batch = train.batch(plan.records(id));
            let (g, ids, loss) = pass(&mut *model, &mut part, &batch, &dims, u64::from(epoch) << 32 | u64::from(index));
            losses.push(loss);
            if index % 39 == 38 {
                let mut measures = Measures::new(&ms.metrics);
                for start in (0..1024).step_by(64) {
                    let batch = test.batch((start..start + 64).collect());
                    let dense = part.dense().to_vec();
                    model.evaluate(Inputs { batch: &batch, dense: &dense, rows: &[] }, &mut measures).unwrap();
                }
                eprintln!("  step {}: train loss {:.3} (last 39), {:?}", losses.len(), losses[losses.len()-39..].iter().sum::<f32>() / 39.0, measures.values());
            }
            // merge equal ids
            let (mut counts, mut uids, mut grads) = (vec![], vec![], vec![]);
            for (t, ids) in ids.iter().enumerate() {
                let mut m: BTreeMap<u64, Vec<f32>> = BTreeMap::new();
                for (i, id) in ids.iter().enumerate() {
                    let row = &g.rows[t][i * dims[t]..][..dims[t]];
                    let e = m.entry(*id).or_insert_with(|| vec![0.0; dims[t]]);
                    e.iter_mut().zip(row).for_each(|(a, b)| *a += b);
                }
                counts.push(m.len() as u32);
                for (k, v) in m { uids.push(k); grads.extend(v); }
            }
            let push = Push::new(Head { batch: id, n_records: batch.len() as u32, base_version: part.version(), partitions: 0..1, layout }, &dims, Body { dense: g.dense, counts, ids: uids, grads }).unwrap();
            queue.push_back(Arc::new(push));
            if queue.len() > delay { part.push(&queue.pop_front().unwrap()); }
        }
        while let Some(p) = queue.pop_front() { part.push(&p); }
        let mut measures = Measures::new(&ms.metrics);
        let nt = test.len();
        for start in (0..nt).step_by(64) {
            let batch = test.batch((start..nt.min(start + 64)).collect());
            let ids = model.lookups(&batch).unwrap();
            let rows: Vec<Vec<f32>> = ids.iter().enumerate().map(|(t, ids)| { let mut o = vec![0.0; ids.len() * dims[t]]; part.gather(t, ids, &mut o); o }).collect();
            let dense = part.dense().to_vec();
            model.evaluate(Inputs { batch: &batch, dense: &dense, rows: &rows }, &mut measures).unwrap();
        }
        eprintln!("{name} epoch {epoch}: {:?} {:.1}s rows {}", measures.values(), t0.elapsed().as_secs_f64(), part.n_rows());
    }
}
fn pass(model: &mut dyn edl_tensor::model::Model, part: &mut Partition, batch: &Batch, dims: &[usize], seed: u64) -> (Gradient, Vec<Vec<u64>>, f32) {
    let ids = model.lookups(batch).unwrap();
    let rows: Vec<Vec<f32>> = ids.iter().enumerate().map(|(t, ids)| { let mut o = vec![0.0; ids.len() * dims[t]]; part.gather(t, ids, &mut o); o }).collect();
    let dense = part.dense().to_vec();
    let mut g = Gradient::default();
    let o = model.train(Inputs { batch, dense: &dense, rows: &rows }, seed, &mut g).unwrap();
    (g, ids, o.loss)
}
