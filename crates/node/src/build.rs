//! Making a template: a disk, a boot, the warm-up, the freeze.
//!
//! ```text
//! source ─▶ disk.img ─▶ boot ─▶ daemon answers ─▶ start command ─▶ ready ─▶ warm-up ─▶ quiesce ─▶ save ─▶ digest ─▶ publish
//! ```
//! Everything happens under `tmp/` of the pool and in a work folder beside it; the last step is one read-only snapshot
//! under the digest's name. A build that fails, is cancelled or dies leaves nothing that has a name.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use space_core::limits;
use space_hostd::cgroup::Weight;
use space_hostd::host::Host;
use space_hostd::points;
use space_hostd::pool::Area;
use space_hostd::protocol::Build;
use space_image::digest::{self, ManifestEntry};
use space_image::remote::{self, Order};
use space_image::{ImageConfig, Progress, Source};
use space_proto::guest::{ExitReason, GetProcessRequest, ProcessRef, ProcessSpec, ReserveRequest};
use space_proto::node::build_event::Kind;
use space_proto::node::{BuildError, BuildEvent, BuildProgress, BuildTemplateRequest, TemplateOptions};
use space_vmm::{SaveKind, Vm, VmDir, VmmError, dir};
use tokio::sync::mpsc;
use tonic::Status;

use crate::NodeError;
use crate::guest::Guest;
use crate::run::{self, SlotGuard, unix_ms};
use crate::runs::Runs;
use crate::template::{self, Meta, Template};
use crate::warm::{quiesce, run_once};

/// A kernel and its daemon under emulation, beside a busy server.
pub const BOOT_PATIENCE: Duration = Duration::from_secs(300);
const READY_DEFAULT: Duration = Duration::from_secs(120);
const READY_MAX: Duration = Duration::from_secs(3600);
const READY_PAUSE: Duration = Duration::from_millis(300);
const TAIL_BYTES: usize = 2000;

type Events = mpsc::Sender<Result<BuildEvent, Status>>;

/// Begins a build. The receiver gives progress, then one result or error; dropping it cancels.
pub fn start(runs: Arc<Runs>, request: BuildTemplateRequest) -> mpsc::Receiver<Result<BuildEvent, Status>> {
    let (events, receiver) = mpsc::channel(64);
    tokio::spawn(async move {
        let report = Report { events: events.clone(), cancelled: Arc::new(AtomicBool::new(false)) };
        let build = build(&runs, &request, &report);
        let kind = match build.await {
            Ok(template) => Kind::Result(template.info(runs.made_from(&template.digest))),
            Err(error) => Kind::Error(BuildError { code: error.code().to_owned(), message: error.text() }),
        };
        let _ = events.send(Ok(BuildEvent { kind: Some(kind) })).await;
    });
    receiver
}

/// Passes progress on; never waits for a slow reader.
struct Report {
    events: Events,
    cancelled: Arc<AtomicBool>,
}

impl Progress for Report {
    fn step(&self, text: &str) {
        let progress = BuildProgress { step: text.to_owned(), done: 0, total: 0 };
        let _ = self.events.try_send(Ok(BuildEvent { kind: Some(Kind::Progress(progress)) }));
    }

    fn bytes(&self, done: u64, total: Option<u64>) {
        let progress = BuildProgress { step: String::new(), done, total: total.unwrap_or(0) };
        let _ = self.events.try_send(Ok(BuildEvent { kind: Some(Kind::Progress(progress)) }));
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.events.is_closed()
    }
}

/// The options with every default filled in, or why they make no sense.
fn checked(options: TemplateOptions, runs: &Runs) -> Result<TemplateOptions, NodeError> {
    let or = |value: u32, default: u32| if value == 0 { default } else { value };
    let filled = TemplateOptions {
        memory_mib: or(options.memory_mib, limits::MEMORY_DEFAULT_MIB),
        vcpus: or(options.vcpus, limits::VCPUS_DEFAULT),
        disk_bytes: if options.disk_bytes == 0 { limits::DISK_DEFAULT_BYTES } else { options.disk_bytes },
        ..options
    };
    let fault = if !(limits::MEMORY_MIN_MIB..=limits::MEMORY_MAX_MIB).contains(&filled.memory_mib) {
        format!("memory must be {} to {} MiB", limits::MEMORY_MIN_MIB, limits::MEMORY_MAX_MIB)
    } else if filled.vcpus > limits::VCPUS_MAX.min(runs.config.cpus * 4) {
        format!("this node has {} CPUs; at most four times as many virtual ones", runs.config.cpus)
    } else if !(limits::DISK_MIN_BYTES..=limits::DISK_MAX_BYTES).contains(&filled.disk_bytes) {
        "a disk has 64 MiB to 1 TiB".to_owned()
    } else {
        return Ok(filled);
    };
    Err(NodeError::Invalid(fault))
}

/// Removes the root file systems of builds whose service died.
pub async fn sweep(runs: &Arc<Runs>) -> Result<(), NodeError> {
    let left = |runs: &Runs| {
        if let Err(error) = runs.config.host.end_build(None) {
            // A tool of the dead build may still write there; the next start tries again.
            tracing::warn!(%error, "the remains of a build are left for the next start");
        }
        Ok(())
    };
    runs.blocking(left).await
}

/// Folders of one build, removed whatever happens.
struct Scratch {
    runs: Arc<Runs>,
    name: String,
}

impl Scratch {
    fn new(runs: &Arc<Runs>) -> Self {
        Self { runs: runs.clone(), name: format!("build-{}", uuid::Uuid::new_v4().simple()) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let host = &self.runs.config.host;
        for removed in [host.end_build(Some(&self.name)), host.delete(Area::Tmp, &self.name)] {
            if let Err(error) = removed {
                tracing::warn!(%error, "the remains of a build are left for the next start");
            }
        }
    }
}

/// Lets the builder make the disk, in a process with the rights for that.
fn build_disk(
    host: &Host,
    name: &str,
    source: &Source,
    order: &Order,
    progress: &Report,
) -> Result<ImageConfig, NodeError> {
    let (ours, theirs) = UnixStream::pair().map_err(NodeError::io("make a stream for the builder"))?;
    let mut fds = vec![theirs.into()];
    if let Some(path) = source.local() {
        // With our own rights, which are nobody's: the builder has more.
        let hint = format!("open {} (the server has no rights of its own: let everybody read it)", path.display());
        fds.push(std::fs::File::open(path).map_err(NodeError::io(hint))?.into());
    }
    let packages = matches!(source, Source::Debian(_));
    let build = Build { name: name.to_owned(), network: source.local().is_none(), packages };
    let builder = host.build(build, &fds)?;
    // Its end of the stream is in it alone.
    drop(fds);
    let config = remote::follow(ours, order, progress);
    // It ends by itself when its stream does; what is in its work folder then is nobody's.
    builder.kill().map_err(VmmError::from)?;
    tokio::runtime::Handle::current().block_on(builder.wait());
    Ok(config?)
}

async fn build(runs: &Arc<Runs>, request: &BuildTemplateRequest, report: &Report) -> Result<Arc<Template>, NodeError> {
    let source = space_image::source::parse(&request.source)?;
    let options = checked(request.options.clone().unwrap_or_default(), runs)?;
    report.step("waiting for another build");
    let _turn = runs.builds.acquire().await.map_err(|_| NodeError::Cancelled)?;
    if let Some(made) = runs.templates.made_by(&request.build_id)? {
        return Ok(made);
    }
    crate::capacity::check_pool(&runs.config.host, runs.config.pool_reserve_bytes + (512 << 20))?;
    let scratch = Scratch::new(runs);
    let folder = runs.config.host.create(Area::Tmp, &scratch.name)?;
    points::reach("build.created");
    let id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_URL, request.source.as_bytes());
    let order = Order {
        source: request.source.clone(),
        disk_bytes: options.disk_bytes,
        id,
        plain_http: request.insecure_registry,
    };
    let progress = Report { events: report.events.clone(), cancelled: report.cancelled.clone() };
    let name = scratch.name.clone();
    let built = runs.blocking(move |runs| build_disk(&runs.config.host, &name, &source, &order, &progress)).await?;
    points::reach("build.disk");
    let meta = meta(runs, request, &options, built).await?;
    freeze(runs, &scratch, &folder, &options, &meta, report).await?;
    points::reach("build.frozen");
    let template = publish(runs, &scratch, folder, meta, report).await?;
    points::reach("build.published");
    Ok(template)
}

async fn meta(
    runs: &Runs,
    request: &BuildTemplateRequest,
    options: &TemplateOptions,
    built: ImageConfig,
) -> Result<Meta, NodeError> {
    let driver = &runs.config.driver;
    let mut env = built.env;
    env.extend(options.env.clone());
    let or = |own: &str, image: String| if own.is_empty() { image } else { own.to_owned() };
    Ok(Meta {
        format: template::FORMAT,
        source: request.source.clone(),
        memory_mib: options.memory_mib,
        vcpus: options.vcpus,
        disk_bytes: options.disk_bytes,
        disk_bytes_used: 0,
        memory_bytes_used: 0,
        start_command: options.start_command.clone(),
        ready_command: options.ready_command.clone(),
        user: or(&options.user, built.user),
        workdir: or(&options.workdir, built.workdir),
        env,
        entrypoint: built.entrypoint,
        cmd: built.cmd,
        kernel: runs.config.kernel_version.clone(),
        vmm: format!("{} {}", driver.name(), driver.version().await?),
        compatibility: driver.compatibility().await?,
        guest_protocol: space_proto::GUEST_PROTOCOL,
        created_unix_ms: unix_ms(),
        build_id: request.build_id.clone(),
    })
}

/// Boots the disk, brings the guest where it should be, and leaves memory, disk and device state of that instant.
async fn freeze(
    runs: &Arc<Runs>,
    scratch: &Scratch,
    folder: &Path,
    options: &TemplateOptions,
    meta: &Meta,
    report: &Report,
) -> Result<(), NodeError> {
    let _promise = runs.promise(options.memory_mib).await?;
    let slot = SlotGuard::take(&runs.slots)?;
    let memory = run::limits(options.memory_mib, options.vcpus, Weight::Normal);
    let name = scratch.name.clone();
    let group = runs.blocking(move |runs| Ok(runs.config.host.create_group(&name, memory)?)).await?;
    let spec = run::vm_spec(runs, options.memory_mib, options.vcpus, &slot, group.name());
    report.step("booting the guest");
    let booted = runs.config.driver.boot(&spec, &VmDir::new(folder)).await;
    let outcome = match booted {
        Ok(vm) => {
            let vm: Arc<dyn Vm> = Arc::from(vm);
            let outcome = tokio::select! {
                outcome = settle(&vm, options, meta, report) => outcome,
                exit = vm.wait() => Err(NodeError::Guest(format!("it ended while it was prepared: {exit}"))),
                () = report.events.closed() => Err(NodeError::Cancelled),
            };
            let outcome = outcome.map_err(|error| with_console(error, folder));
            vm.kill().await?;
            vm.wait().await;
            outcome
        }
        Err(error) => Err(error.into()),
    };
    runs.blocking(move |_| Ok(group.end()?)).await?;
    outcome
}

/// From the kernel's first instruction to the saved state.
async fn settle(vm: &Arc<dyn Vm>, options: &TemplateOptions, meta: &Meta, report: &Report) -> Result<(), NodeError> {
    let template = Template { digest: String::new(), name: String::new(), meta: meta.clone() };
    let refresh = run::refresh("template", HashMap::new(), &template)?;
    let guest = Guest::refreshed(vm.clone(), None, 0, refresh, BOOT_PATIENCE).await;
    let guest = match guest {
        Ok(guest) => guest,
        Err(error) => {
            let _ = vm.drain_console().await;
            return Err(error);
        }
    };
    if !options.start_command.is_empty() {
        report.step("running the start command");
        let id = begin(&guest, &options.start_command).await?;
        // One that fails at once is a fault of the template, not of each sandbox.
        let ended = ended(&guest, &id, Duration::from_millis(200)).await?;
        if let Some((code, tail)) = ended.filter(|(code, _)| *code != 0) {
            return Err(NodeError::Guest(format!("the start command ended with status {code}: {tail}")));
        }
    }
    if !options.ready_command.is_empty() {
        report.step("waiting until the guest is ready");
        ready(&guest, options).await?;
    }
    report.step("warming up");
    for argv in [&["/bin/true"][..], &["/bin/sh", "-c", ":"], &["python3", "-c", "1"], &["/bin/sh", "-c", ":"]] {
        run_once(&guest, argv).await?;
    }
    report.step("freezing the guest");
    quiesce(&guest).await?;
    vm.sync_ahead().await?;
    drop(guest);
    vm.save(SaveKind::Full).await?;
    Ok(())
}

async fn begin(guest: &Guest, script: &str) -> Result<String, NodeError> {
    let failed = |status: Status| NodeError::Guest(status.message().to_owned());
    let spec = ProcessSpec { argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(), ..ProcessSpec::default() };
    let id = space_core::CommandId::new().to_string();
    let (mut client, _) = guest.client().await?;
    let reserve = ReserveRequest { process_id: id.clone(), spec: Some(spec), expires_ms: 0 };
    client.reserve(reserve).await.map_err(failed)?;
    client.start(ProcessRef { process_id: id.clone() }).await.map_err(failed)?;
    Ok(id)
}

/// Status and the end of the output, once it has ended within the time.
async fn ended(guest: &Guest, id: &str, wait: Duration) -> Result<Option<(i32, String)>, NodeError> {
    let failed = |status: Status| NodeError::Guest(status.message().to_owned());
    let (mut client, _) = guest.client().await?;
    let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    let request = GetProcessRequest { process_id: id.to_owned(), wait_ms };
    let info = client.get_process(request).await.map_err(failed)?.into_inner();
    let Some(exit) = info.exit else { return Ok(None) };
    let mut tail = if exit.reason == i32::from(ExitReason::StartFailed) { exit.message } else { String::new() };
    let open = space_proto::guest::AttachOpen {
        process_id: id.to_owned(),
        offset: info.output_end.saturating_sub(TAIL_BYTES as u64).max(info.output_start),
        read_only: true,
        no_follow: true,
    };
    let open = space_proto::guest::AttachInput { kind: Some(space_proto::guest::attach_input::Kind::Open(open)) };
    let mut output = client.attach(tokio_stream::once(open)).await.map_err(failed)?.into_inner();
    while let Ok(Some(message)) = output.message().await {
        if let Some(space_proto::guest::attach_output::Kind::Output(chunk)) = message.kind
            && tail.len() < 2 * TAIL_BYTES
        {
            tail.push_str(&String::from_utf8_lossy(&chunk.data));
        }
    }
    Ok(Some((exit.code, tail)))
}

async fn ready(guest: &Guest, options: &TemplateOptions) -> Result<(), NodeError> {
    let limit = match options.ready_timeout_ms {
        0 => READY_DEFAULT,
        ms => Duration::from_millis(ms).min(READY_MAX),
    };
    let deadline = tokio::time::Instant::now() + limit;
    loop {
        let id = begin(guest, &options.ready_command).await?;
        let last = ended(guest, &id, deadline.saturating_duration_since(tokio::time::Instant::now())).await?;
        if matches!(last, Some((0, _))) {
            return Ok(());
        }
        if tokio::time::Instant::now() >= deadline {
            let said =
                last.map_or_else(|| "it did not end".to_owned(), |(code, tail)| format!("status {code}: {tail}"));
            return Err(NodeError::Guest(format!("the ready command never succeeded within {limit:?}; last: {said}")));
        }
        tokio::time::sleep(READY_PAUSE).await;
    }
}

/// What the guest's console says of why it did not come up: the daemon's and the kernel's complaints, else its end.
pub fn with_console(error: NodeError, folder: &Path) -> NodeError {
    const TELLING: [&str; 4] = ["space-daemon:", "Initramfs", "Kernel panic", "Out of memory"];
    let (text, _) = console(folder, limits::CONSOLE_MAX_BYTES);
    if matches!(error, NodeError::Cancelled) || text.is_empty() {
        return error;
    }
    let text: String = String::from_utf8_lossy(&text).chars().map(|c| if c.is_control() { '\n' } else { c }).collect();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let telling = lines.iter().filter(|line| TELLING.iter().any(|word| line.contains(word))).copied();
    let mut said: Vec<&str> = telling.take(6).collect();
    if said.is_empty() {
        said = lines[lines.len().saturating_sub(6)..].to_vec();
    }
    NodeError::Guest(format!("{}; its console said: {}", error.text(), said.join(" | ")))
}

/// At most `max` bytes of the end of a console log, and whether there was more.
pub fn console(folder: &Path, max: usize) -> (Vec<u8>, bool) {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let Ok(mut file) = std::fs::File::open(folder.join(dir::CONSOLE_LOG)) else { return (Vec::new(), false) };
    let len = file.metadata().map_or(0, |m| m.len());
    let skip = len.saturating_sub(max as u64);
    let mut text = Vec::new();
    let read = file.seek(SeekFrom::Start(skip)).and_then(|_| file.take(max as u64).read_to_end(&mut text));
    (if read.is_ok() { text } else { Vec::new() }, skip > 0)
}

async fn publish(
    runs: &Arc<Runs>,
    scratch: &Scratch,
    folder: PathBuf,
    mut meta: Meta,
    report: &Report,
) -> Result<Arc<Template>, NodeError> {
    report.step("computing the digest");
    let name = scratch.name.clone();
    let progress = Report { events: report.events.clone(), cancelled: report.cancelled.clone() };
    runs.blocking(move |runs| {
        VmDir::new(&folder).remove_traces()?;
        let mut entries = Vec::new();
        for file in [dir::DISK, dir::MEMORY, dir::DEVICE_STATE] {
            let path = folder.join(file);
            let synced = std::fs::File::open(&path).and_then(|f| f.sync_all());
            synced.map_err(NodeError::io(format!("sync {}", path.display())))?;
            entries.push(ManifestEntry::of_file(file, &path, &progress)?);
        }
        meta.disk_bytes_used = used(&folder.join(dir::DISK));
        meta.memory_bytes_used = used(&folder.join(dir::MEMORY));
        let hex = digest::manifest(&entries, &meta.digested())?;
        let text = serde_json::to_vec_pretty(&meta).expect("plain data");
        let file = folder.join(template::FILE);
        std::fs::write(&file, text)
            .and_then(|()| std::fs::File::open(&file)?.sync_all())
            .map_err(NodeError::io(format!("write {}", file.display())))?;
        let digest = format!("sha256:{hex}");
        match runs.config.host.snapshot((Area::Tmp, &name), (Area::Templates, &hex), true) {
            // The same content was built before; that one stays.
            Ok(_) | Err(space_hostd::protocol::HostError::AlreadyExists(_)) => {}
            Err(error) => return Err(error.into()),
        }
        runs.templates.get(&digest)
    })
    .await
}

/// Bytes that a sparse file really holds.
fn used(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).map_or(0, |m| m.blocks() * 512)
}
