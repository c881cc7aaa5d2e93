// SPDX-License-Identifier: Apache-2.0
//! Draws the full-screen view.

use edl_core::job::JobState;
use edl_core::spec::JobType;
use edl_core::text::decimal;
use edl_net::proto::{Goodput, Instance, JobStatus};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph};

use super::screen::{Curve, Screen, bounds};
use crate::console::{grouped, lane_range, span};
use crate::ui::{epoch, metrics_text};

const KEYS: &str = " + - scale   ↑ ↓ select   k kill   q quit (the job keeps running) ";
/// Below this height there are no plots.
const MIN_HEIGHT_OF_PLOTS: u16 = 24;

pub(crate) fn draw(frame: &mut Frame<'_>, screen: &Screen) {
    let status = &screen.status;
    let plots = if frame.area().height >= MIN_HEIGHT_OF_PLOTS { 10 } else { 0 };
    let n_processes = u16::try_from(screen.processes().count()).unwrap_or(u16::MAX);
    let [head, bar, charts, middle, events, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(1),
        Constraint::Length(plots),
        Constraint::Length(n_processes.clamp(8, 14) + 2),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(heading(status), head);
    frame.render_widget(progress(status), bar);
    if plots > 0 {
        let [left, right] = Layout::horizontal([Constraint::Fill(1); 2]).areas(charts);
        plot(frame, left, "loss", &screen.loss, Color::Yellow);
        plot(frame, right, "records/s", &screen.rate, Color::Cyan);
    }
    let [left, right] =
        Layout::horizontal([Constraint::Fill(3), Constraint::Fill(2)]).areas(middle);
    frame.render_widget(processes(screen), left);
    frame.render_widget(goodput(status.goodput.as_ref(), right.width), right);
    frame.render_widget(log(status, events.height), events);
    frame.render_widget(footer(screen), foot);
}

fn heading(status: &JobStatus) -> Paragraph<'static> {
    let colour = match status.state() {
        JobState::Running | JobState::Evaluating | JobState::Succeeded => Color::Green,
        JobState::Failed => Color::Red,
        JobState::Starting
        | JobState::Recovering
        | JobState::Finishing
        | JobState::Stopped
        | JobState::Waiting
        | JobState::Interrupted => Color::Yellow,
    };
    let first = Line::from(vec![
        Span::styled(status.job.clone(), Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!("  {} {}  ", status.job_type(), status.model_def)),
        Span::styled(status.state().name(), Style::new().fg(colour)),
        Span::raw(if status.reason.is_empty() {
            String::new()
        } else {
            format!(": {}", status.reason)
        }),
    ]);
    let measured = status.evaluations.last().map_or(String::new(), |evaluation| {
        format!(
            "   evaluated at step {}: {}",
            grouped(evaluation.version),
            metrics_text(evaluation)
        )
    });
    let left = if status.eta_secs < 0.0 {
        String::new()
    } else {
        format!(", {} left", span(status.eta_secs))
    };
    let second = format!(
        "step {}, loss {}, {}{left}{measured}",
        grouped(status.step),
        status.known_loss().map_or("–".into(), |loss| decimal(loss.into())),
        span(status.elapsed_secs)
    );
    Paragraph::new(vec![first, Line::raw(second)])
}

fn progress(status: &JobStatus) -> Gauge<'static> {
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    let share = status.records_done as f64 / status.records_total.max(1) as f64;
    let epoch = if status.num_epochs > 0 && status.job_type() == JobType::Train {
        format!("epoch {}, ", epoch(status, " of "))
    } else {
        String::new()
    };
    let label = format!(
        "{epoch}{} of {} records, {:.0} %",
        grouped(status.records_done),
        grouped(status.records_total),
        share * 100.0
    );
    Gauge::default()
        .gauge_style(Style::new().fg(Color::Blue))
        .ratio(share.clamp(0.0, 1.0))
        .label(label)
}

fn plot(frame: &mut Frame<'_>, area: Rect, title: &'static str, curve: &Curve, colour: Color) {
    let block = Block::bordered().title(format!(" {title} "));
    let points: Vec<(f64, f64)> = curve.iter().copied().collect();
    let Some((times, values)) = bounds(&points) else {
        frame.render_widget(Paragraph::new("waiting for the first steps").block(block), area);
        return;
    };
    let dataset = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .style(Style::new().fg(colour))
        .data(&points);
    let axis = Axis::default().bounds(times).labels(times.map(span));
    let chart = Chart::new(vec![dataset])
        .block(block)
        .x_axis(axis)
        .y_axis(Axis::default().bounds(values).labels(values.map(short)));
    frame.render_widget(chart, area);
}

/// A number for an axis.
fn short(value: f64) -> String {
    match value {
        value if value >= 10_000.0 => format!("{:.0}k", value / 1000.0),
        value if value >= 100.0 => format!("{value:.0}"),
        value => format!("{value:.3}"),
    }
}

fn processes(screen: &Screen) -> Paragraph<'static> {
    let lines: Vec<Line<'static>> = screen
        .processes()
        .map(|process| process_line(process, screen.is_chosen(process)))
        .collect();
    let wanted = screen.status.workers_wanted;
    let title = format!(" processes (target workers: {wanted}) ");
    Paragraph::new(lines).block(Block::bordered().title(title))
}

fn process_line(process: &Instance, is_chosen: bool) -> Line<'static> {
    let mark = if is_chosen { "▸" } else { " " };
    let text = format!(
        "{mark} {:<11} {:<12} {:<10} restarts {:<3} pid {}",
        process.name(),
        process.state(),
        lane_range(&process.lanes),
        process.restarts,
        process.pid
    );
    let style =
        if is_chosen { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
    Line::styled(text, style)
}

/// Where the workers' time went, as bars.
fn goodput(goodput: Option<&Goodput>, width: u16) -> Paragraph<'static> {
    let spent = goodput.and_then(|goodput| goodput.workers).unwrap_or_default();
    let total = spent.total();
    let bar_width = f64::from(width.saturating_sub(24));
    let lines: Vec<Line<'static>> = spent
        .parts()
        .into_iter()
        .map(|(kind, secs)| {
            let share = if total > 0.0 { secs / total } else { 0.0 };
            #[expect(clippy::cast_possible_truncation, reason = "a width in columns")]
            #[expect(clippy::cast_sign_loss, reason = "a share of a width")]
            let bar = "█".repeat((share * bar_width).round() as usize);
            let name = kind.name().replace('_', " ");
            Line::raw(format!("{name:<12}{:>5.1} % {bar}", share * 100.0))
        })
        .collect();
    let share = goodput.map_or(0.0, |goodput| goodput.share * 100.0);
    let title = format!(" worker time: {share:.0} % computing ");
    Paragraph::new(Text::from(lines)).block(Block::bordered().title(title))
}

/// The newest last, as far as they fit.
fn log(status: &JobStatus, height: u16) -> Paragraph<'static> {
    let n_lines = usize::from(height.saturating_sub(2));
    let skipped = status.events.len().saturating_sub(n_lines);
    let lines: Vec<Line<'static>> = status.events[skipped..]
        .iter()
        .map(|event| Line::raw(format!("{:<14} {}", event.kind(), event.text)))
        .collect();
    Paragraph::new(lines).block(Block::bordered().title(" events "))
}

fn footer(screen: &Screen) -> Paragraph<'static> {
    Paragraph::new(Line::from(vec![
        Span::styled(KEYS, Style::new().add_modifier(Modifier::DIM)),
        Span::styled(screen.message.clone(), Style::new().fg(Color::Yellow)),
    ]))
}

#[cfg(test)]
mod tests {
    use edl_core::job::EventKind;
    use edl_core::platform::InstanceState;
    use edl_net::proto::{Event, Spent};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn status(at: f64) -> JobStatus {
        let worker = |id: u32| Instance {
            role: edl_core::platform::Role::Worker.into(),
            id,
            pid: 4000 + id,
            state: InstanceState::Working.into(),
            lanes: vec![2 * id, 2 * id + 1],
            ..Instance::default()
        };
        let workers = Spent { compute: 9.0, communicate: 1.0, ..Spent::default() };
        JobStatus {
            job: "demo".into(),
            job_type: JobType::Train.into(),
            model_def: "mnist_cnn".into(),
            state: JobState::Running.into(),
            num_epochs: 2,
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small")]
            step: at as u64 + 1,
            records_done: 2_500,
            records_total: 10_000,
            records_per_second: 900.0 + at,
            elapsed_secs: at,
            loss: 0.7,
            workers_wanted: 2,
            instances: vec![worker(0), worker(1)],
            goodput: Some(Goodput { workers: Some(workers), share: 0.9, ..Goodput::default() }),
            events: vec![Event {
                kind: EventKind::World.into(),
                text: "two train on".into(),
                ..Event::default()
            }],
            ..JobStatus::default()
        }
    }

    fn drawn(width: u16, height: u16, n_seconds: u32) -> String {
        let mut screen = Screen::default();
        for second in 0..n_seconds {
            screen.take(status(f64::from(second) + 0.5));
        }
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a test backend");
        terminal.draw(|frame| draw(frame, &screen)).expect("it draws");
        terminal.backend().to_string()
    }

    #[test]
    fn the_screen_shows_progress_processes_time_and_events() {
        let text = drawn(110, 40, 30);
        for word in [
            "demo",
            "running",
            "epoch 1 of 2",
            "2,500 of 10,000 records, 25 %",
            " loss ",
            "records/s",
            "▸ worker-0",
            "lanes 2-3",
            "90 % computing",
            "communicate",
            "10.0 %",
            "two train on",
            "k kill",
        ] {
            assert!(text.contains(word), "`{word}` is missing in\n{text}");
        }
        assert!(
            text.contains('⠤') || text.contains('⣀') || text.contains('⠒') || text.contains('⠉'),
            "a curve:\n{text}"
        );
    }

    #[test]
    fn a_small_terminal_shows_text_and_never_breaks() {
        assert!(drawn(80, 20, 3).contains("worker-1"));
        for (width, height) in [(1, 1), (10, 3), (40, 12), (300, 5)] {
            drawn(width, height, 2);
        }
    }
}
