// SPDX-License-Identifier: Apache-2.0
//! `top`: a full-screen view of a job, with keys. Quitting it does not affect the job.

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
use crate::console::eprint;
use crate::control::{self, Master};
use crate::exit::{Exit, refuse};
use crate::jobs::Job;
use crate::ui::Watched;
use crate::{cluster, signals};

use screen::{Action, Key, Screen};

const REFRESH: Duration = Duration::from_millis(250);
/// How long the thread that reads keys may take to notice that the view is closed.
const KEY_WAIT: Duration = Duration::from_millis(100);
/// More than a user types ahead.
const KEYS_AHEAD: usize = 64;

/// Called with every new status; the text that it returns is shown.
pub(crate) type Meanwhile<'a> = &'a mut dyn FnMut(&JobStatus) -> Option<String>;

/// Shows a running job.
pub(crate) fn run(args: &JobArg) -> anyhow::Result<Exit> {
    let job = cluster::find_local(args, "top", "use `elasticdl attach`")?;
    let name = job.name().unwrap_or_default();
    if !can_show() {
        return Err(refuse(format!(
            "`top` needs a terminal; `elasticdl status {name}` prints the same information once"
        )));
    }
    if !job.is_running() {
        return Err(refuse(format!("job `{name}` is not running; see `elasticdl status {name}`")));
    }
    watched(&job)
}

/// Shows a running job, and prints how to reach it afterwards.
pub(crate) fn watched(job: &Job) -> anyhow::Result<Exit> {
    let name = job.name().unwrap_or_default();
    match show(job, &mut |_| None)? {
        Watched::JobEnded => {
            let state = job.state();
            eprint(format_args!("job {name} ended ({state}); see `elasticdl status {name}`"));
        }
        Watched::UserLeft => {
            eprint(format_args!("the job keeps running; stop it with `elasticdl stop {name}`"));
        }
    }
    Ok(Exit::Ok)
}

/// Whether there is a terminal to show a job on.
pub(crate) fn can_show() -> bool {
    std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Shows the job until it ends or the user quits.
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
                        screen.show_message(text);
                    }
                    screen.take(status);
                }
            }
            key = keys.recv() => {
                let Some(key) = key else { return Ok(Watched::UserLeft) };
                match screen.key(key) {
                    None => {}
                    Some(Action::Quit) => return Ok(Watched::UserLeft),
                    Some(Action::Scale(workers)) => scale(job, workers, &mut screen).await,
                    Some(Action::Kill { name, pid }) => kill(&name, pid, &mut screen),
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
    let request = async { Master::of(job).await?.scale(workers).await };
    match control::within(request).await {
        Ok(_) => screen.show_message(format!("scaling workers to {workers}")),
        Err(error) => screen.failed(format!("{error:#}")),
    }
}

/// Kills a process like `kill -9`, to see the job recover.
fn kill(name: &str, pid: u32, screen: &mut Screen) {
    match signals::send(pid, Signal::KILL) {
        Some(Ok(())) => screen.show_message(format!("{name} was killed")),
        Some(Err(error)) => screen.failed(format!("cannot kill {name}: {error}")),
        None => screen.failed(format!("{name} has no process on this machine")),
    }
}

/// The keys that have a meaning here. A separate thread reads them, because reading blocks.
fn keys() -> mpsc::Receiver<Key> {
    let (to, keys) = mpsc::channel(KEYS_AHEAD);
    std::thread::spawn(move || {
        while !to.is_closed() {
            let key = match event::poll(KEY_WAIT)
                .and_then(|is_there| is_there.then(event::read).transpose())
            {
                Ok(Some(event)) => key(&event),
                Ok(None) => None,
                // The terminal is gone.
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
        KeyCode::Char('c') if is_control => Some(Key::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Key::Quit),
        KeyCode::Char('+' | '=') => Some(Key::More),
        KeyCode::Char('-' | '_') => Some(Key::Fewer),
        KeyCode::Char('k') => Some(Key::Kill),
        KeyCode::Up => Some(Key::Up),
        KeyCode::Down => Some(Key::Down),
        _ => None,
    }
}
