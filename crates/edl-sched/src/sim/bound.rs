// SPDX-License-Identifier: Apache-2.0
//! The most that any planner could use at a moment, as a bound for utilization.

use crate::resources::Resources;
use crate::snapshot::{Job, Node, Role, Roles};

/// The most that pods could request on these nodes, in GPUs if there are any, or else in thousandths
/// of a CPU: what is taken, all masters and servers, and as many workers as fit and are allowed. None
/// if the pods of jobs differ in shape.
///
/// Exact, except that masters are assumed to fit. Dynamic programming over nodes: the only choice is
/// how many servers a node holds; workers fill the rest.
#[must_use]
pub fn most_asked(nodes: &[Node], jobs: &[&Job]) -> Option<u64> {
    let has_gpus = nodes.iter().any(|node| node.capacity.gpu > 0);
    let amount = |of: Resources| if has_gpus { of.gpu } else { of.cpu_milli };
    let taken: u64 = nodes.iter().map(|node| amount(node.taken)).sum();
    let Some(roles) = jobs.first().map(|job| job.roles) else { return Some(taken) };
    if jobs.iter().any(|job| shapes(&job.roles) != shapes(&roles)) {
        return None;
    }
    let n_at_most = |role: Role| jobs.iter().map(|job| job.roles.of(role).max).sum::<u32>();
    let demand = |role: Role| amount(roles.of(role).shape) * u64::from(n_at_most(role));
    let masters = demand(Role::Master);
    let n_servers = usize::try_from(n_at_most(Role::Ps)).ok()?;
    let capacity = |node: &Node| vec![node.capacity.saturating_sub(node.taken)];
    let capacities: Vec<Vec<Resources>> = nodes.iter().map(capacity).collect();
    let packed = packed(&capacities, &roles, n_servers, amount);
    let wanted = demand(Role::Ps) + demand(Role::Worker);
    Some(taken + masters + packed.min(wanted))
}

/// The sum of the same over several moments, with servers that stay on their nodes, as a planner
/// could choose them that knew the future. `capacities` has the capacity of each node for jobs at
/// each moment.
#[must_use]
pub fn most_asked_by_staying(capacities: &[Vec<Resources>], jobs: &[&Job]) -> Option<u64> {
    let roles = jobs.first()?.roles;
    let has_gpus = capacities.iter().flatten().any(|capacity| capacity.gpu > 0);
    let amount = |of: Resources| if has_gpus { of.gpu } else { of.cpu_milli };
    let n_servers = jobs.iter().map(|job| job.roles.ps.max).sum::<u32>();
    let is_alike = jobs.iter().all(|job| shapes(&job.roles) == shapes(&roles));
    let n_servers = usize::try_from(n_servers).ok().filter(|_| is_alike)?;
    Some(packed(capacities, &roles, n_servers, amount))
}

/// The most that `n_servers` servers (or as many as fit) and any number of workers request.
fn packed(
    capacities: &[Vec<Resources>],
    roles: &Roles,
    n_servers: usize,
    amount: impl Fn(Resources) -> u64,
) -> u64 {
    let (server, worker) = (roles.ps.shape, roles.worker.shape);
    // The best so far with 0, 1, 2, … servers placed.
    let mut best: Vec<Option<u64>> = vec![None; n_servers + 1];
    best[0] = Some(0);
    for moments in capacities {
        let here = |n_here: usize| -> u64 {
            let n_here = n_here as u64;
            let at = |capacity: &Resources| {
                let left = capacity.saturating_sub(server * n_here);
                amount(server) * n_here + amount(worker) * worker.times_in(left)
            };
            moments.iter().map(at).sum()
        };
        let most = moments.iter().map(|capacity| server.times_in(*capacity)).min().unwrap_or(0);
        let most = usize::try_from(most).unwrap_or(n_servers).min(n_servers);
        let gains: Vec<u64> = (0..=most).map(here).collect();
        let mut next: Vec<Option<u64>> = vec![None; n_servers + 1];
        for (placed, used) in best.iter().enumerate() {
            let Some(used) = used else { continue };
            for (slot, gain) in next[placed..].iter_mut().zip(&gains) {
                *slot = Some(slot.map_or(used + gain, |had| had.max(used + gain)));
            }
        }
        best = next;
    }
    best.into_iter().rev().flatten().next().unwrap_or(0)
}

fn shapes(roles: &Roles) -> [Resources; 3] {
    Role::ALL.map(|role| roles.of(role).shape)
}

#[cfg(test)]
mod tests {
    use edl_core::time::Time;

    use super::*;
    use crate::snapshot::{JobId, NodeId, RoleSpec};

    fn cpus(n: u64) -> Resources {
        Resources::new(0, 1000 * n, 0)
    }

    fn job(n_servers: u32, max_workers: u32) -> Job {
        let fixed = |shape, n| RoleSpec { shape, min: n, max: n };
        let worker = RoleSpec { shape: cpus(5), min: 1, max: max_workers };
        let roles = Roles { master: fixed(cpus(1), 1), ps: fixed(cpus(4), n_servers), worker };
        Job::new(JobId(0), Time::ZERO, roles)
    }

    #[test]
    fn servers_go_where_they_cost_least() {
        let nodes = [12, 12, 23].map(|n| Node::new(NodeId(0), cpus(n)));
        // 5+5, 5+5 and 4+4+5+5+5; a server on a node of 12 would leave 3 idle.
        assert_eq!(most_asked(&nodes, &[&job(2, 60)]), Some(1000 + 43_000));
        // There are not more workers than there may be.
        assert_eq!(most_asked(&nodes, &[&job(2, 3)]), Some(1000 + 23_000));
        let busy = Node { taken: cpus(9), ..Node::new(NodeId(1), cpus(12)) };
        assert_eq!(most_asked(&[busy], &[&job(0, 60)]), Some(1000 + 9000));
    }

    #[test]
    fn servers_that_stay_must_suit_every_moment() {
        let capacities = |each: &[u64]| each.iter().map(|n| cpus(*n)).collect::<Vec<_>>();
        // Either node holds two workers at one moment and one at the other. A server beside them
        // wastes nothing when there are 9 CPUs and 1 when there are 10; it cannot change over.
        let (one, other) = (capacities(&[9, 10]), capacities(&[10, 9]));
        assert_eq!(most_asked_by_staying(&[one, other], &[&job(1, 9)]), Some(19_000 + 14_000));
    }

    #[test]
    fn jobs_of_many_shapes_have_no_bound() {
        let mut other = job(0, 3);
        other.roles.worker.shape = cpus(7);
        assert_eq!(most_asked(&[], &[&job(0, 3), &other]), None);
    }
}
