// SPDX-License-Identifier: Apache-2.0
//! Distributes capacity above the minimums: to the jobs with least, within the load limit, the quotas
//! and the freeze windows.
//!
//! Both steps only raise the smallest share that they touch. There are finitely many ways to
//! distribute finitely many pods, so both terminate. At the end, neither finds anything to do, so
//! planning again changes nothing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::board::{Board, JobEntry, JobIx, NodeIx};
use crate::fairness::{Measure, OrderedF64, is_fairer, level, queue_level};
use crate::packing;
use crate::plan::Reason;
use crate::quota;
use crate::resources::{ResourceKind, Resources};
use crate::snapshot::{NodeState, QueueId, Role};

/// The rules of one policy.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub measure: Measure,
    /// Whether recently resized jobs are left alone, and growth comes in steps.
    pub has_hysteresis: bool,
}

/// Gives free capacity to the job with the least, worker by worker, until nothing fits.
pub fn fill(board: &mut Board<'_>, rules: Rules) {
    let mut open = OpenJobs::new(board, rules);
    while let Some(job) = open.pop_least() {
        if !may_grow(board, job, rules) || packing::put_worker(board, job).is_none() {
            continue;
        }
        let reason = match rules.measure {
            Measure::Share => Reason::FreeCapacity,
            Measure::Fulfillment => Reason::LeastFulfilled,
        };
        board.because(job, reason);
        open.push(board, job, rules);
    }
}

/// Moves workers one by one from jobs with more to jobs with less, while that is fairer, and from
/// lower to higher priority.
pub fn rebalance(board: &mut Board<'_>, rules: Rules) {
    // A safety limit, in case the argument above is wrong.
    let n_workers: u64 = board.jobs.iter().map(|entry| u64::from(entry.counts.worker)).sum();
    let mut left = n_workers * n_workers + 1;
    loop {
        let mut has_moved = false;
        let mut givers = Givers::new(board, rules);
        for poor in poorest_first(board, rules) {
            while left > 0
                && may_take_more(board, poor, rules, board.options.freeze)
                && take_from_richest(board, poor, rules, &mut givers)
            {
                has_moved = true;
                left -= 1;
            }
        }
        if !has_moved || left == 0 {
            return;
        }
    }
}

/// Scales servers with workers.
pub fn follow_with_servers(board: &mut Board<'_>) {
    for job in 0..board.jobs.len() {
        let entry = &board.jobs[job];
        if entry.job.roles.ps.min >= entry.job.roles.ps.max || !entry.has_gang() {
            continue;
        }
        let wanted = entry.job.counts_at(entry.counts.worker).ps;
        while board.jobs[job].counts.ps > wanted {
            crate::trim::drop_one(board, job, Role::Ps);
            board.because(job, Reason::ServersFollow);
        }
        while board.jobs[job].counts.ps < wanted {
            let shape = board.jobs[job].job.roles.ps.shape;
            if !quota::allows(board, board.jobs[job].job.queue, shape)
                || !is_below_load(board, shape)
            {
                break;
            }
            let Some((node, _)) = packing::cheapest_spot(board, job, Role::Ps, 1) else { break };
            board.put(job, Role::Ps, node, 1);
            board.because(job, Reason::ServersFollow);
        }
    }
}

/// Whether the rules allow a job one more worker, apart from free capacity.
fn may_grow(board: &Board<'_>, job: JobIx, rules: Rules) -> bool {
    let shape = board.jobs[job].job.roles.worker.shape;
    may_take_more(board, job, rules, free_capacity_freeze(board))
        && is_below_load(board, shape)
        && quota::allows(board, board.jobs[job].job.queue, shape)
}

/// How long a resized job is left alone if capacity is unused, which justifies a resize sooner.
fn free_capacity_freeze(board: &Board<'_>) -> Duration {
    board.options.freeze / 4
}

/// Whether a job's own limits let it grow: maximum, freeze window, step and gain.
fn may_take_more(board: &Board<'_>, job: JobIx, rules: Rules, freeze: Duration) -> bool {
    let entry = &board.jobs[job];
    if !entry.can_grow() || entry.job.fault().is_some() {
        return false;
    }
    // A job that starts with this plan may start large: it has no work to interrupt.
    if !rules.has_hysteresis || !entry.ran_before {
        return true;
    }
    let n_before = entry.n_before;
    // In one plan, a job either gives workers or takes them.
    let has_shrunk = entry.counts.worker < n_before;
    let limit = n_before.saturating_mul(board.options.growth).max(n_before.saturating_add(4));
    !has_shrunk
        && entry.counts.worker < limit
        && !entry.was_resized_within(freeze, board.now)
        && is_worth_it(board, job, n_before, limit)
}

/// Whether growing to its limit saves a job clearly more time than the resize costs.
fn is_worth_it(board: &Board<'_>, job: JobIx, n_before: u32, limit: u32) -> bool {
    let spec = board.jobs[job].job;
    let Some(speed) = &spec.speed else { return true };
    let most = limit.min(spec.roles.worker.max);
    let now = speed.at(n_before, false).max(speed.at(n_before, true));
    let then = speed.at(most, false).max(speed.at(most, true));
    if now <= 0.0 {
        return true;
    }
    let saved = speed.remaining / now - speed.remaining / then.max(now);
    saved > spec.resize_cost.as_secs_f64() * f64::from(board.options.gain)
}

/// Whether the load limit allows `more`, in every shared kind that it requests.
#[must_use]
pub fn is_below_load(board: &Board<'_>, more: Resources) -> bool {
    let line = board.total.permille(board.options.max_load_permille);
    let after = board.asked + more;
    let is_below = |kind| more.of(kind) == 0 || after.of(kind) <= line.of(kind);
    ResourceKind::SHARED.into_iter().all(is_below)
}

fn poorest_first(board: &Board<'_>, rules: Rules) -> Vec<JobIx> {
    let mut poor: Vec<JobIx> = (0..board.jobs.len())
        .filter(|job| may_take_more(board, *job, rules, board.options.freeze))
        .collect();
    poor.sort_by_cached_key(|job| {
        let entry = &board.jobs[*job];
        let queue = board.queues[&entry.job.queue].used;
        let queue = OrderedF64(queue_level(board, entry.job.queue, queue));
        let own = OrderedF64(level(board, *job, entry.counts, rules.measure));
        (Reverse(entry.job.priority), queue, own, entry.job.id)
    });
    poor
}

/// Moves one worker to `poor` from the job that can best spare it; returns whether there is one.
fn take_from_richest(
    board: &mut Board<'_>,
    poor: JobIx,
    rules: Rules,
    givers: &mut Givers,
) -> bool {
    let groups = givers.groups(board, board.jobs[poor].job.priority);
    let mut refusals = std::mem::take(&mut givers.refusals);
    let kind = givers.kinds[poor];
    let search = |group| {
        let refused = &mut refusals[kind];
        take_from_group(board, poor, rules, givers.group(group), group, refused)
    };
    let found = groups.into_iter().find_map(search);
    givers.refusals = refusals;
    if let Some(rich) = found {
        givers.update(board, rich, rules);
        givers.update(board, poor, rules);
    }
    found.is_some()
}

/// The same among givers of one priority and queue; returns the giver.
fn take_from_group(
    board: &mut Board<'_>,
    poor: JobIx,
    rules: Rules,
    givers: impl Iterator<Item = Giver>,
    (priority, queue): (i32, QueueId),
    refusals: &mut [bool],
) -> Option<JobIx> {
    let own_queue = board.jobs[poor].job.queue;
    let own = OrderedF64(level(board, poor, board.jobs[poor].counts, rules.measure));
    let is_lower = priority < board.jobs[poor].job.priority;
    let goes_by_queue = rules.measure == Measure::Share && queue != own_queue;
    if !is_lower && goes_by_queue && !is_richer_queue(board, queue, own_queue) {
        return None;
    }
    // Between queues, fairness is the same for all givers of one shape.
    let mut unfair: Vec<Resources> = Vec::new();
    for (Reverse(has), rich) in givers {
        if !is_lower && !goes_by_queue && has <= own {
            return None;
        }
        let shape = board.jobs[rich].job.roles.worker.shape;
        if rich == poor || refusals[rich] || unfair.contains(&shape) {
            continue;
        }
        let is_fair = is_lower || is_fairer(board, rich, poor, rules.measure);
        if goes_by_queue && !is_fair {
            unfair.push(shape);
        }
        if !is_fair || (!is_lower && is_left_alone(board, rich, rules)) {
            continue;
        }
        if transfer(board, rich, poor) {
            return Some(rich);
        }
        refusals[rich] = true;
    }
    None
}

fn is_richer_queue(board: &Board<'_>, one: QueueId, other: QueueId) -> bool {
    let of = |queue: QueueId| queue_level(board, queue, board.queues[&queue].used);
    of(one) > of(other)
}

/// Whether a job must not give workers: it was resized recently, or grows in this plan.
fn is_left_alone(board: &Board<'_>, job: JobIx, rules: Rules) -> bool {
    let entry = &board.jobs[job];
    rules.has_hysteresis
        && entry.ran_before
        && (entry.counts.worker > entry.n_before
            || entry.was_resized_within(board.options.freeze, board.now))
}

type Giver = (Reverse<OrderedF64>, JobIx);

/// Jobs with workers above their minimum, by priority and queue, the largest first.
struct Givers {
    by_group: BTreeMap<(i32, QueueId), BTreeSet<Giver>>,
    levels: Vec<Option<OrderedF64>>,
    /// The kind of each taker: if one of a kind finds no node, none does.
    kinds: Vec<usize>,
    /// By kind of taker, givers on whose nodes it does not fit. Nodes change, so this holds for one
    /// round; the last round, in which nothing moves, is exact.
    refusals: Vec<Vec<bool>>,
}

impl Givers {
    fn new(board: &Board<'_>, rules: Rules) -> Self {
        let n = board.jobs.len();
        let mut found = BTreeMap::new();
        let kind = |entry: &JobEntry<'_>| {
            let job = entry.job;
            let key = (job.roles.worker.shape, job.tolerates, job.selects, job.queue);
            let next = found.len();
            *found.entry(key).or_insert(next)
        };
        let kinds: Vec<usize> = board.jobs.iter().map(kind).collect();
        let refusals = vec![vec![false; n]; found.len()];
        let mut givers = Self { by_group: BTreeMap::new(), levels: vec![None; n], kinds, refusals };
        for job in 0..board.jobs.len() {
            givers.update(board, job, rules);
        }
        givers
    }

    fn update(&mut self, board: &Board<'_>, job: JobIx, rules: Rules) {
        let entry = &board.jobs[job];
        let group = self.by_group.entry((entry.job.priority, entry.job.queue)).or_default();
        if let Some(before) = self.levels[job].take() {
            group.remove(&(Reverse(before), job));
        }
        if entry.surplus() > 0 && entry.has_gang() && entry.job.fault().is_none() {
            let now = OrderedF64(level(board, job, entry.counts, rules.measure));
            group.insert((Reverse(now), job));
            self.levels[job] = Some(now);
        }
    }

    /// Groups that give to jobs of a priority: the lowest priority first, then the largest queue.
    fn groups(&self, board: &Board<'_>, priority: i32) -> Vec<(i32, QueueId)> {
        let upto = self.by_group.range(..=(priority, QueueId(u32::MAX)));
        let mut groups: Vec<(i32, QueueId)> =
            upto.filter(|(_, jobs)| !jobs.is_empty()).map(|(group, _)| *group).collect();
        groups.sort_by_cached_key(|(priority, queue)| {
            let used = OrderedF64(queue_level(board, *queue, board.queues[queue].used));
            (*priority, Reverse(used), *queue)
        });
        groups
    }

    fn group(&self, group: (i32, QueueId)) -> impl Iterator<Item = Giver> {
        self.by_group.get(&group).into_iter().flatten().copied()
    }
}

/// Moves one worker from `rich` to `poor` on a node where it fits; returns whether there is one.
fn transfer(board: &mut Board<'_>, rich: JobIx, poor: JobIx) -> bool {
    let (giver, taker) = (board.jobs[rich].job, board.jobs[poor].job);
    let (given, taken) = (giver.roles.worker.shape, taker.roles.worker.shape);
    let fits = |(node, _): &(NodeIx, u32)| {
        board.nodes[*node].state == NodeState::Ready
            && taker.may_use(board.nodes[*node])
            && taken.fits_in(board.free(*node) + given)
    };
    let spots = board.jobs[rich].workers_on().filter(fits);
    let spot = spots.min_by_key(|(node, n)| {
        let is_beside = board.jobs[poor].on.contains_key(node);
        (Reverse(is_beside), *n, *node)
    });
    let Some((node, _)) = spot else { return false };
    let bookmark = board.bookmark();
    board.take(rich, Role::Worker, node, 1);
    let is_allowed = quota::allows(board, taker.queue, taken)
        && !quota::would_borrow_what_is_owned(board, taker.queue, taken, giver.queue)
        && (taken.fits_in(given) || is_below_load(board, taken));
    if !is_allowed {
        board.rewind(bookmark);
        return false;
    }
    board.put(poor, Role::Worker, node, 1);
    if giver.priority < taker.priority {
        board.because(poor, Reason::HigherPriority { than: giver.id });
        board.because(rich, Reason::Preempted { by: taker.id });
    } else {
        board.because(poor, Reason::BelowFairShare { from: giver.id });
        board.because(rich, Reason::AboveFairShare { to: taker.id });
    }
    true
}

type ByQueue = BTreeMap<QueueId, BTreeSet<(OrderedF64, JobIx)>>;

/// Jobs that may still grow, in the order in which they do: the highest priority, then the queue with
/// the smallest share, then the job with the smallest share.
struct OpenJobs {
    measure: Measure,
    by_priority: BTreeMap<Reverse<i32>, ByQueue>,
    /// The sizes of all queues.
    levels: BTreeMap<QueueId, OrderedF64>,
}

impl OpenJobs {
    fn new(board: &Board<'_>, rules: Rules) -> Self {
        let (by_priority, levels) = (BTreeMap::new(), BTreeMap::new());
        let mut open = Self { measure: rules.measure, by_priority, levels };
        for job in 0..board.jobs.len() {
            open.push(board, job, rules);
        }
        open
    }

    /// Adds a job if it may grow. Its queue may have grown with it.
    fn push(&mut self, board: &Board<'_>, job: JobIx, rules: Rules) {
        let queue = board.jobs[job].job.queue;
        let used = board.queues[&queue].used;
        self.levels.insert(queue, OrderedF64(queue_level(board, queue, used)));
        if may_take_more(board, job, rules, free_capacity_freeze(board)) {
            let entry = &board.jobs[job];
            let own = OrderedF64(level(board, job, entry.counts, self.measure));
            let queues = self.by_priority.entry(Reverse(entry.job.priority)).or_default();
            queues.entry(queue).or_default().insert((own, job));
        }
    }

    fn pop_least(&mut self) -> Option<JobIx> {
        loop {
            let mut first = self.by_priority.first_entry()?;
            let queues = first.get_mut();
            let least = queues.keys().copied().min_by_key(|queue| (self.levels[queue], *queue));
            let Some(queue) = least else {
                first.remove();
                continue;
            };
            match queues.get_mut(&queue).and_then(BTreeSet::pop_first) {
                Some((_, job)) => return Some(job),
                None => {
                    queues.remove(&queue);
                }
            }
        }
    }
}
