//! What the guest says of processes, in the words of the API. Texts of the guest are cut to a length.

use space_api::{Exit, Process};
use space_proto::guest::{self as pb, ExitReason, ProcessState};

const TEXT_MAX_CHARS: usize = 1000;

fn cut(text: &str) -> String {
    text.chars().take(TEXT_MAX_CHARS).collect()
}

pub fn exit(exit: pb::Exit) -> Exit {
    let reason = match ExitReason::try_from(exit.reason).unwrap_or(ExitReason::Lost) {
        ExitReason::ExitedNormally => "exited",
        ExitReason::Signaled => "signaled",
        ExitReason::Timeout => "timeout",
        ExitReason::OomKilled => "oom_killed",
        ExitReason::StartFailed => "start_failed",
        ExitReason::Lost | ExitReason::Unspecified => "lost",
    };
    Exit {
        reason: reason.to_owned(),
        code: exit.code,
        signal: (exit.signal != 0).then_some(exit.signal),
        message: (!exit.message.is_empty()).then(|| cut(&exit.message)),
    }
}

pub fn process(info: pb::ProcessInfo) -> Process {
    let spec = info.spec.unwrap_or_default();
    let state = match ProcessState::try_from(info.state).unwrap_or(ProcessState::Unspecified) {
        ProcessState::Reserved | ProcessState::Unspecified => "reserved",
        ProcessState::Running => "running",
        ProcessState::Exited => "exited",
    };
    Process {
        id: cut(&info.process_id),
        state: state.to_owned(),
        argv: spec.argv.iter().take(64).map(|arg| cut(arg)).collect(),
        user: cut(&spec.user),
        workdir: cut(&spec.workdir),
        terminal: spec.pty.is_some(),
        pid: info.pid,
        started_at_ms: (info.started_unix_ms != 0).then_some(info.started_unix_ms),
        ended_at_ms: (info.ended_unix_ms != 0).then_some(info.ended_unix_ms),
        exit: info.exit.map(exit),
        output_start: info.output_start,
        output_end: info.output_end,
        attached: info.attached,
    }
}
