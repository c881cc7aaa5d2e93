// SPDX-License-Identifier: Apache-2.0
//! `top`: a job on the whole terminal, with keys. Leaving it leaves the job alone.

mod draw;
mod screen;

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::Context as _;
use edl_net::proto::JobStatus;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use rustix::process::Signal;
use tokio::sync::mpsc;

use crate::cli::JobArg;
use crate::exit::{Exit, refuse};
use crate::jobs::Job;
use crate::say::say;
use crate::{cluster, control, signals};

use screen::{Ask, Key, Screen};

const REFRESH: Duration = Duration::from_millis(250);
/// How long the thread that reads keys may take to notice that nobody listens.
const KEY_WAIT: Duration = Duration::from_millis(100);
/// Nobody types faster than this much ahead.
const KEYS_AHEAD: usize = 64;

/// What else happens at each look at the job; what it says is shown.
pub(crate) type Meanwhile<'a> = &'a mut dyn FnMut(&JobStatus) -> Option<String>;

/// How the watching ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    JobEnded,
    UserLeft,
}

/// Shows a job that runs.
pub(crate) fn run(args: &JobArg) -> anyhow::Result<Exit> {
    let job = cluster::find_here(args, "top", "use `elasticdl attach`")?;
    let name = job.name().unwrap_or_default();
    if !can_show() {
        return Err(refuse(format!(
            "`top` needs a terminal; `elasticdl status {name}` prints the same once"
        )));
    }
    if !job.is_running() {
        return Err(refuse(format!("job `{name}` is not running; see `elasticdl status {name}`")));
    }
    watched(&job)
}

/// Shows a job that runs, and says how it goes on without a watcher.
pub(crate) fn watched(job: &Job) -> anyhow::Result<Exit> {
    let name = job.name().unwrap_or_default();
    match show(job, &mut |_| None)? {
        Watched::JobEnded => {
            let state = job.state();
            say(format_args!("job {name} ended ({state}); see `elasticdl status {name}`"));
        }
        Watched::UserLeft => {
            say(format_args!("the job keeps running; stop it with `elasticdl stop {name}`"));
        }
    }
    Ok(Exit::Ok)
}

/// Whether there is a terminal to show a job on.
pub(crate) fn can_show() -> bool {
    std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Shows the job until it ends or the user has seen enough.
pub(crate) fn show(job: &Job, meanwhile: Meanwhile<'_>) -> anyhow::Result<Watched> {
    let mut terminal = ratatui::try_init().context("cannot open the terminal")?;
    let watched = crate::runtime()?.block_on(watch(job, &mut terminal, meanwhile));
    ratatui::restore();
    watched
}

async fn watch(
    job: &Job,
    terminal: &mut DefaultTerminal,
    meanwhile: Meanwhile<'_>,
) -> anyhow::Result<Watched> {
    let mut keys = keys();
    let mut screen = Screen::default();
    let mut ticks = tokio::time::interval(REFRESH);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                if let Some(status) = job.fresh_status() {
                    if let Some(text) = meanwhile(&status) {
                        screen.tell(text);
                    }
                    screen.take(status);
                }
            }
            key = keys.recv() => {
                let Some(key) = key else { return Ok(Watched::UserLeft) };
                match screen.key(key) {
                    None => {}
                    Some(Ask::Leave) => return Ok(Watched::UserLeft),
                    Some(Ask::Scale(workers)) => scale(job, workers, &mut screen).await,
                    Some(Ask::Kill { name, pid }) => kill(&name, pid, &mut screen),
                }
            }
        }
        terminal.draw(|frame| draw::draw(frame, &screen)).context("cannot draw")?;
        if !job.is_running() {
            return Ok(Watched::JobEnded);
        }
    }
}

async fn scale(job: &Job, workers: u32, screen: &mut Screen) {
    match control::scale(job, workers).await {
        Ok(_) => screen.tell(format!("scaling workers to {workers}")),
        Err(error) => screen.failed(format!("{error:#}")),
    }
}

/// As `kill -9` does: what heals is what is to be seen.
fn kill(name: &str, pid: u32, screen: &mut Screen) {
    match signals::send(pid, Signal::KILL) {
        Some(Ok(())) => screen.tell(format!("{name} was killed")),
        Some(Err(error)) => screen.failed(format!("cannot kill {name}: {error}")),
        None => screen.failed(format!("{name} has no process on this machine")),
    }
}

/// The keys that mean something, read by a thread of their own: reading blocks.
fn keys() -> mpsc::Receiver<Key> {
    let (to, keys) = mpsc::channel(KEYS_AHEAD);
    std::thread::spawn(move || {
        while !to.is_closed() {
            let key = match event::poll(KEY_WAIT)
                .and_then(|is_there| is_there.then(event::read).transpose())
            {
                Ok(Some(event)) => key(&event),
                Ok(None) => None,
                // The terminal is gone, and with it whoever looked.
                Err(_) => return,
            };
            if let Some(key) = key
                && to.blocking_send(key).is_err()
            {
                return;
            }
        }
    });
    keys
}

#[expect(clippy::wildcard_enum_match_arm, reason = "all other keys mean nothing here")]
fn key(event: &Event) -> Option<Key> {
    let Event::Key(key) = event else { return None };
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if is_control => Some(Key::Leave),
        KeyCode::Char('q') | KeyCode::Esc => Some(Key::Leave),
        KeyCode::Char('+' | '=') => Some(Key::More),
        KeyCode::Char('-' | '_') => Some(Key::Fewer),
        KeyCode::Char('k') => Some(Key::Kill),
        KeyCode::Up => Some(Key::Up),
        KeyCode::Down => Some(Key::Down),
        _ => None,
    }
}
