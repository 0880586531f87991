//! The channel into one guest: a link session with gRPC in it, made again when it breaks while the VM lives.
//!
//! The guest is hostile: this never waits without a limit and never holds more than one connection.

use std::sync::Arc;
use std::time::Duration;

use space_core::SandboxId;
use space_proto::guest::guest_client::GuestClient;
use space_proto::guest::{Hello, HelloAck, Hook, InfoRequest, QuiesceRequest, RefreshRequest};
use space_proto::link::{Carrier, LinkError};
use space_proto::{GUEST_PROTOCOL, link};
use space_vmm::Vm;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::NodeError;
use crate::record::Record;
use crate::run;

/// For a guest that runs; emulated and one of many on few cores.
const RECONNECT: Duration = Duration::from_secs(20);
/// How wrong a guest's clock may be after it was set, and how often it is set for that.
const CLOCK_ERROR_MAX: Duration = Duration::from_millis(100);
const CLOCK_TRIES: u32 = 3;

pub struct Guest {
    vm: Arc<dyn Vm>,
    current: Mutex<Current>,
}

struct Current {
    channel: Option<Channel>,
    /// Counts the connections, so that only the one that failed is thrown away.
    epoch: u64,
}

fn hello(sandbox: Option<&SandboxId>, run: u32, refresh: Option<RefreshRequest>) -> Hello {
    let sandbox = sandbox.map(ToString::to_string).unwrap_or_default();
    Hello { protocol: GUEST_PROTOCOL, sandbox, run, refresh }
}

async fn open(vm: &Arc<dyn Vm>, hello: Hello, limit: Duration) -> Result<(Channel, HelloAck), NodeError> {
    let deadline = Instant::now() + limit;
    let carrier = if vm.agent_connects() { Carrier::Connection } else { Carrier::Channel };
    let stream = tokio::time::timeout_at(deadline, vm.agent()).await.map_err(|_| LinkError::Timeout)??;
    let (stream, ack) = link::connect(stream, carrier, hello, deadline).await?;
    Ok((link::guest_channel(stream), ack))
}

impl Guest {
    /// Connects with a refresh; the guest is usable only if this succeeds.
    pub async fn refreshed(
        vm: Arc<dyn Vm>,
        sandbox: Option<&SandboxId>,
        run: u32,
        refresh: RefreshRequest,
        limit: Duration,
    ) -> Result<Self, NodeError> {
        let (channel, ack) = open(&vm, hello(sandbox, run, Some(refresh)), limit).await?;
        if ack.refresh.is_none() {
            return Err(NodeError::Guest("it did not confirm its refresh".to_owned()));
        }
        Ok(Self { vm, current: Mutex::new(Current { channel: Some(channel), epoch: 1 }) })
    }

    /// Of a VM that was adopted: connects when first needed, without a refresh.
    pub fn adopted(vm: Arc<dyn Vm>) -> Self {
        Self { vm, current: Mutex::new(Current { channel: None, epoch: 0 }) }
    }

    /// Tells a guest that lives on what only the host knows, and lets its programs run. Its clock is right within
    /// [`CLOCK_ERROR_MAX`] when this returns: one that was told late is told again.
    pub async fn go_on(&self, record: &Record, hook: Hook, limit: Duration) -> Result<(), NodeError> {
        let deadline = Instant::now() + limit;
        let mut hook = hook;
        for _ in 0..CLOCK_TRIES {
            let begun = Instant::now();
            self.refresh(run::refresh_again(record, hook)?, deadline).await?;
            if begun.elapsed() <= CLOCK_ERROR_MAX {
                break;
            }
            hook = Hook::None;
        }
        Ok(())
    }

    /// Of a guest that is booting, whose disk is of an earlier life.
    pub async fn boot_up(&self, record: &Record, limit: Duration) -> Result<(), NodeError> {
        let deadline = Instant::now() + limit;
        let request = run::refresh_again(record, Hook::None)?;
        self.refresh(RefreshRequest { defaults: Some(record.defaults.clone().into()), ..request }, deadline).await?;
        // What it was told waited for it to be up.
        self.go_on(record, Hook::None, RECONNECT).await
    }

    /// By the channel there is, else by a new one.
    async fn refresh(&self, request: RefreshRequest, deadline: Instant) -> Result<(), NodeError> {
        let mut current = self.current.lock().await;
        if let Some(channel) = &current.channel {
            let limit = deadline.saturating_duration_since(Instant::now()) / 2;
            let mut client = GuestClient::new(channel.clone());
            match tokio::time::timeout(limit, client.refresh(request.clone())).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(status)) => tracing::debug!(%status, "a refresh by a new channel"),
                Err(_) => tracing::debug!("a refresh by a new channel: the old one is silent"),
            }
        }
        current.channel = None;
        let request = RefreshRequest { realtime_ns: run::now_ns(), ..request };
        let left = deadline.saturating_duration_since(Instant::now());
        let (channel, ack) = open(&self.vm, hello(None, 0, Some(request)), left).await?;
        if ack.refresh.is_none() {
            return Err(NodeError::Guest("it did not confirm its refresh".to_owned()));
        }
        current.epoch += 1;
        current.channel = Some(channel);
        Ok(())
    }

    /// Syncs the guest's file systems and freezes its programs; says whether it did.
    pub async fn quiesce(&self, hooks: bool, limit: Duration) -> bool {
        let asked = async {
            let (mut client, _) = self.client().await?;
            let request = QuiesceRequest { freeze: true, freeze_disk: true, hooks, ..QuiesceRequest::default() };
            client.quiesce(request).await.map_err(|status| NodeError::Guest(status.message().to_owned()))
        };
        match tokio::time::timeout(limit, asked).await {
            Ok(Ok(_)) => true,
            Ok(Err(error)) => {
                tracing::info!(error = error.text(), "a guest did not stand still");
                false
            }
            Err(_) => {
                tracing::info!(?limit, "a guest did not stand still in time");
                false
            }
        }
    }

    /// CPU time of the guest's programs, if it can tell.
    pub async fn cpu_us(&self, limit: Duration) -> Option<u64> {
        let asked = async { self.client().await.ok()?.0.info(InfoRequest {}).await.ok() };
        let info = tokio::time::timeout(limit, asked).await.ok()??.into_inner();
        (info.cpu_us > 0).then_some(info.cpu_us)
    }

    /// A save has cut what was there.
    pub async fn cut(&self) {
        if self.vm.agent_connects() {
            self.current.lock().await.channel = None;
        }
    }

    /// The channel and its number, for [`Guest::lost`].
    pub async fn channel(&self) -> Result<(Channel, u64), NodeError> {
        let mut current = self.current.lock().await;
        if let Some(channel) = &current.channel {
            return Ok((channel.clone(), current.epoch));
        }
        let (channel, _) = open(&self.vm, hello(None, 0, None), RECONNECT).await?;
        current.epoch += 1;
        current.channel = Some(channel.clone());
        Ok((channel, current.epoch))
    }

    pub async fn client(&self) -> Result<(GuestClient<Channel>, u64), NodeError> {
        let (channel, epoch) = self.channel().await?;
        Ok((GuestClient::new(channel), epoch))
    }

    /// The connection of that number failed: the next caller makes a new one.
    pub async fn lost(&self, epoch: u64) {
        let mut current = self.current.lock().await;
        if current.epoch == epoch {
            current.channel = None;
        }
    }
}
